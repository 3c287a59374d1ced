"""A real Kafka on this machine from Python packages alone: the embedded broker and Kafka's own tools."""
