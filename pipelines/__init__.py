"""The Beam pipelines: transitions in, prioritised batches out."""
