"""Metrics and JSON lines from events."""
