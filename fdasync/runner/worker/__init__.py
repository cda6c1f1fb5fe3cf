"""Runs any runner in a process of its own: the engine's proxy, the process, their messages and weights."""
