"""Conformance of stores."""
