"""Small checkpoints for tests, examples and benchmarks: random ones of all families, and one that speaks."""
