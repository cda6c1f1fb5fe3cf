"""The vocabulary of facts, the bus that carries them, and their trace."""
