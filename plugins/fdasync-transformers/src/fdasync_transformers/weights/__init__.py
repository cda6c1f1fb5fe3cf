"""Loads the weights of a checkpoint folder into a model, and replaces weights in place while an engine runs."""
