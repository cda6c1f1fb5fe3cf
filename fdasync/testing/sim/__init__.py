"""Virtual time and whole engines in it."""
