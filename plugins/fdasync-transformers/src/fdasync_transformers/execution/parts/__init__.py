"""The parts of a step on a device: what samples, scores, drafts, records and agrees around the model's pass."""
