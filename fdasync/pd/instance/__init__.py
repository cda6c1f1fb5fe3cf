"""An engine that others can reach."""
