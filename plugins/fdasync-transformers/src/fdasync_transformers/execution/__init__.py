"""Performs steps, on a CPU or on a GPU: executors, CUDA graphs, the profile of memory."""
