"""What the commands share: options that make a configuration, the check of plugins, signals, and output to stdout."""
