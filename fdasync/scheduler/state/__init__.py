"""The scheduler's state: its configuration, sequences and their queues, and the policy that orders them."""
