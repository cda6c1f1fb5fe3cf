"""What moves between device, host and store."""
