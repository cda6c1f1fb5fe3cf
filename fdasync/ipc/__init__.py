"""Child processes, framed messages with fds, shared memory with the `Part`s that name runs of it; knows nothing of
engines."""
