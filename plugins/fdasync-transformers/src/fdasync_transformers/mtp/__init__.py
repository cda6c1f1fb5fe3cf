"""Multi-token prediction: the layers that some checkpoints have behind their last one, as a drafter of tokens."""
