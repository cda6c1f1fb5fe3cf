"""What can be seen of engines at work: what `Generator.watch` tells, how it is recorded, how it is read."""
