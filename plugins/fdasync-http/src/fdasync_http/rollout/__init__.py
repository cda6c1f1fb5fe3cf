"""Our own form of a rollout: one safetensors file for each sample, with everything that a trainer needs of it."""
