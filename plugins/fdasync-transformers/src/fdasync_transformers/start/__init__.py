"""Makes a checkpoint folder a model that is ready to be served, and a runner of it; says before whether it can be."""
