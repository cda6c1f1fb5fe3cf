"""Where the Triton kernels were."""

raise ImportError("moved to fdasync_kernels: in a checkout, pip install ./plugins/fdasync-kernels", name=__name__)
