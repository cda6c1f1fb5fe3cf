"""Makes a trainer's forward passes choose the experts that a rollout recorded, instead of those of its own router."""
