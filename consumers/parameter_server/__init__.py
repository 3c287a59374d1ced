"""A shard of the weights, and the rules by which gradients change it."""
