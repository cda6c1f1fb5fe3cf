"""The completion ports."""
