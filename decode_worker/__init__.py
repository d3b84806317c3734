"""The decode phase: handed-over sequences, continuous batching, token streams."""
