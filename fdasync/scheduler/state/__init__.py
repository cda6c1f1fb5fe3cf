"""What the scheduler is told and what it holds: sequences and their queues."""
