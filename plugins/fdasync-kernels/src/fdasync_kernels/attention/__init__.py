"""Attention over paged KV: one query a sequence (decode), many (prefill), latents; beside them Hopper's own kernels."""
