"""The conformance suite for stores, and stores that are slow or fail on purpose, to test what uses a store."""
