"""Decisions about blocks below the device: swaps to and from the host, fetches and writes of the store."""
