"""Blocks from device to device between processes: pools of memory that are shown, mapped, copied from and hashed."""
