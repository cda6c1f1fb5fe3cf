"""The face that an engine and a router share: code that takes a `Generator` runs on either.

Knows neither `Engine` nor `Router`; both name `Generator` as a base, so mypy holds them to it. What they tell of their
model is in `runner/facts.py`.
"""

from fdasync.generator.face import Generator
from fdasync.generator.load import InstanceLoad, Load
from fdasync.generator.streams import DeltaStream, Generation

__all__ = ["DeltaStream", "Generation", "Generator", "InstanceLoad", "Load"]
