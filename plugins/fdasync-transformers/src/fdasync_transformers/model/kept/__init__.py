"""Weights that stay as a quantised checkpoint stores them: their forms, and what a model has in their place."""
