"""Child processes, framed messages with fds, calls to a child, deadlines, and shared memory; it knows no engine."""
