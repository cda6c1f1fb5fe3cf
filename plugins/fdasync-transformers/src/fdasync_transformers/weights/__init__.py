"""Loads a folder into a model, and replaces weights in place."""
