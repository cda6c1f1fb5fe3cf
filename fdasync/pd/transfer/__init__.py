"""Copies of blocks between instances."""
