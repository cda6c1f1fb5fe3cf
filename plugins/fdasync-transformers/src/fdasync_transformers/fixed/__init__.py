"""Fixed numerics: bits of a token's numbers depend on its prefix and the weights alone, in rollouts and in trainers."""
