"""The contract of transports, by which an instance copies blocks from another one, those by shared memory and tcp."""
