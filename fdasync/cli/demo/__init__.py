"""The round trip of `make demo`."""
