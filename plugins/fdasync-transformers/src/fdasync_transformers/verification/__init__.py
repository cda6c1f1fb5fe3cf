"""Checks served tokens and rows against the library."""
