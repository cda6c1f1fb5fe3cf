"""What CUDA devices need: completion ports, pools of events and page-locked buffers, copies, capture, kernels.

Imports on machines without CUDA. Runners and plugins use it; the rest of the package does not know it.
"""
