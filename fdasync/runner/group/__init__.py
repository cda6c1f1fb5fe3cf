"""Several runners that compute each step together, the ranks of a group, as one runner with one answer a step."""
