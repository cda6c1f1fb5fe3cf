"""Makes a trainer's forward passes choose the experts that a rollout recorded, not the choice of its own router."""
