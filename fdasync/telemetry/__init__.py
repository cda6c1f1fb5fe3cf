"""Prometheus metrics and JSON lines, made of an engine's events and statistics; no step waits for them."""
