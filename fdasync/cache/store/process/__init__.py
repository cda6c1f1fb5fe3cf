"""Runs any store that may block in a process of its own: the engine's proxy, the process, and their messages."""
