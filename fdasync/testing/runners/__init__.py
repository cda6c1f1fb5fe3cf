"""Conformance of runners."""
