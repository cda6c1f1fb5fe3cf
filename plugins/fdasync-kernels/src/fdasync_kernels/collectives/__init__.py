"""Kernels by which the devices of one host sum tensors: each writes into its peers' memory."""
