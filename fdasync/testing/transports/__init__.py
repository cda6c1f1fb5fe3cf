"""Conformance of transports."""
