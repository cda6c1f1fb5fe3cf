"""Whole fleets in virtual time (ours: may leave the wheel, see 6)."""
