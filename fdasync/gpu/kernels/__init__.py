"""Triton kernels of the GPU path; nothing outside this folder imports triton."""
