"""A library model on flattened, paged batches: KV layout, attention, capture, what families need."""
