"""Modules of a model that are replaced by kernels of ours, each proven at start-up against the module's own code."""
