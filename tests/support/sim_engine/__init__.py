"""A simulated engine: one engine in virtual or real time, under random work, faults, updates and early ends."""
