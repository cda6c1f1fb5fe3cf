"""Mixers of recurrent layers by kernels: the library's forward with kernels in it; gated delta nets of few kernels."""
