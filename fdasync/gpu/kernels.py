"""Where the Triton kernels were."""

raise ImportError("the kernels are fdasync_kernels: pip install fdasync-kernels", name=__name__)
