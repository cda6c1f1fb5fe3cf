"""Tiny random checkpoints of every model family that the library knows, for tests, examples and benchmarks."""
