"""Which weights are in use, as the scheduler knows them.

`core.py` changes it; every part of the scheduler that names blocks or versions reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Weights:
    """See the module.

    Attributes:
        namespace: identities of blocks belong to it; it changes with the weights.
        version: the caller's label of the weights.
        weights_id: what they are, whatever their label.
    """

    namespace: bytes
    version: str
    weights_id: str
