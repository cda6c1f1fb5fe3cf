"""Folders that hold the tensors that changed, with checksums of these and of the weights that they belong to."""
