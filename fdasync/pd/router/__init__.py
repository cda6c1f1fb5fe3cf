"""Requests to instances."""
