"""Performs the steps of the runner on a CPU or on a GPU: executors, CUDA graphs, the profile of the device's memory."""
