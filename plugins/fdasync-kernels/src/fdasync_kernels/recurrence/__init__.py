"""Recurrent layers over the sequences of a step, whose states lie in one memory: convolution and linear recurrence."""
