"""Records data of every token as a step computes it: the routing, its weights, norms of layers."""
