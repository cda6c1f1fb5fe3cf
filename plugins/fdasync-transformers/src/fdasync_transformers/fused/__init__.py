"""Kernels in the place of a model's own modules; each is proven against the module's own code before it takes over."""
