"""The store in a folder: objects in slots of a few large files, an index in memory, and recovery after a crash."""
