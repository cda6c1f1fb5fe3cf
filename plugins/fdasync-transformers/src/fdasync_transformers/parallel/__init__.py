"""One model over several processes: how its tensors are cut, and what the processes tell each other."""
