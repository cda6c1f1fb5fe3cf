"""Virtual time, and the network, transports and processes that exist in it."""
