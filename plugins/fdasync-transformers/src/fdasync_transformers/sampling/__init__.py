"""Samples tokens from logits of a whole step at once, and computes the log-probs that requests want."""
