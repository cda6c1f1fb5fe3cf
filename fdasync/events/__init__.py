"""Events and actions, the bus that carries events, taps that read them, and their trace."""
