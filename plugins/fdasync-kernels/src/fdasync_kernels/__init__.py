"""Triton kernels of mixture-of-experts models: tensors in, tensors out.

A kernel is a function of tensors on one device, or on the CPU in Triton's interpreter. It is queued on the current
stream and never waits. Kernels know no models, no requests and no processes; of fdasync they know `fdasync.errors`.
Runners call them.
"""
