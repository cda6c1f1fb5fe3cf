"""Compares served tokens and expert rows with those of the library's own forward pass, for demos and tests."""
