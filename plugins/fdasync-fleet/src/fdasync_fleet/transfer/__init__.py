"""The contract of transports, by which an instance copies blocks from another, and the transports shm and tcp."""
