"""The network, the transports and the processes of fleets in virtual time."""
