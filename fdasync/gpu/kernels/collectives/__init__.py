"""Kernels by which the devices of one host sum tensors: each reads its peers' memory."""
