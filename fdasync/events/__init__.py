"""The facts and commands of an engine (events and actions), the bus for events, taps that read them, and traces."""
