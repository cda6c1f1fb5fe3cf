"""Performs the steps of the runner on a CPU or on a GPU: an executor, its parts, CUDA graphs, the profile of memory."""
