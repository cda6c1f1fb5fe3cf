"""Fixed numerics of trainers: the values of a rollout's kernels in a trainer's passes, and gradients through them."""
