"""Fixed numerics: every number of a token has bits that depend on its prefix and the weights alone."""
