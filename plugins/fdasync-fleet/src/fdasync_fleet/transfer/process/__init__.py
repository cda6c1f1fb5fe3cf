"""Transports in a process of their own, so that copies and checksums of blocks leave the instance's loop."""
