"""Published weights brought into a checkpoint of this machine: whole ones, and deltas of slime and SkyRL, verified."""
