"""Recurrent layers of a library's model in flattened steps: the state of each sequence, and snapshots of it."""
