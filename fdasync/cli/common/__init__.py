"""Options, signals, stdout."""
