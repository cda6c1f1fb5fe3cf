"""Compares served tokens and expert rows with the library's own forward pass, for demos and tests."""
