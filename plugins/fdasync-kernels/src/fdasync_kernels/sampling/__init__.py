"""Sampling from logits without a sort: masks, penalties, cuts of top-k, top-p and min-p, the draw and log-probs."""
