"""Records what engines do, for those who look on."""
