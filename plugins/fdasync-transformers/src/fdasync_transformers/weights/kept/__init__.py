"""How tensors come to places that are kept as stored, from files and in updates."""
