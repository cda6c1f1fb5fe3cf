"""Gradients of a trainer's model where kernels of a rollout give the values: by code that the backward pass runs."""
