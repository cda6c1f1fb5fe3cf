"""Virtual time for a whole loop, and the network, the transports and the processes that exist in it."""
