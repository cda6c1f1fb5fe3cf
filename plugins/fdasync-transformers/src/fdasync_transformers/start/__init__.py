"""Makes a checkpoint folder a model that is ready to be served, and says before that whether it can be."""
