"""The place of one stored tensor in a model. Pure data, found by `mapping.py`."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """The place of one stored tensor.

    Attributes:
        target: name of the model's tensor.
        row: row (expert) of the target; -1: the whole target.
        part, parts: part `part` of `parts` equal ones of the row.
    """

    target: str
    row: int = -1
    part: int = 0
    parts: int = 1
