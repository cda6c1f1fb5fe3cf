"""What stands between a layer's products: norms, rotary embeddings, gates, the write of KV, and the ends of blocks."""
