"""Which weights are in use, as the scheduler knows them: every part that names blocks or versions reads it here."""

from __future__ import annotations


class Weights:
    """Changed by `core.py` alone.

    Attributes:
        namespace: identities of blocks belong to it; it changes with the weights.
        version: the caller's label of them.
    """

    __slots__ = ("namespace", "version")

    def __init__(self, namespace: bytes, version: int) -> None:
        self.namespace = namespace
        self.version = version
