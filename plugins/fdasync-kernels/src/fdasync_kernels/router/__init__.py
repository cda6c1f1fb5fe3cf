"""Routers: their product in one order of sums, the choice of experts by a family's rule, and the capture of ids."""
