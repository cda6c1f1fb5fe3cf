"""Weights over a process group: the rank that a runner is, what it receives and where, and the trainer's side of it."""
