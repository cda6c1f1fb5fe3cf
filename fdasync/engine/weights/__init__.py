"""The weights and the memory of one engine: pauses, updates whole and in parts, trainers' groups, sleep and wake."""
