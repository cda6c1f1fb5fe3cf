"""Requests handed from a prefill to a decode instance, both sides."""
