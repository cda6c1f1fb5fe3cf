"""The weights and the memory of one engine: pauses, updates whole and in parts, sleep and wake."""
