"""Engines on the synthetic runner, leak checks, fault injection, the model of passes, and what all suites share."""
