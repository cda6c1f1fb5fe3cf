"""A simulated fleet: instances and a router in virtual time, under random work, faults and deaths."""
