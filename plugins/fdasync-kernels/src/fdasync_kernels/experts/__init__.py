"""The experts of a MoE layer: grouping, both products with the activation between them, and the sum of the slots."""
