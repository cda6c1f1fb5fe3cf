"""A store in a folder: objects in the slots of a few large files."""
