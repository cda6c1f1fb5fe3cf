"""Which weights are in use, as the scheduler knows them.

`core.py` changes it; every part of the scheduler that names blocks or versions reads it.
"""

from __future__ import annotations


class Weights:
    """See the module.

    Attributes:
        namespace: identities of blocks belong to it; it changes with the weights.
        version: the caller's label of the weights.
    """

    __slots__ = ("namespace", "version")

    def __init__(self, namespace: bytes, version: str) -> None:
        self.namespace = namespace
        self.version = version
