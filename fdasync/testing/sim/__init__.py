"""Virtual time for a whole loop, and processes that exist in it."""
