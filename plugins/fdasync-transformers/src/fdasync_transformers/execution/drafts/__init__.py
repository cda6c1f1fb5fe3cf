"""Steps on the device that verify drafts: their rows, and which of them stand."""
