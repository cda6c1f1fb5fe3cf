"""Decoder layers of known families by few kernels each: merged projections, the forward, and the proof at start-up."""
