"""Objects in slots of large files."""
