"""The place of one stored tensor in a model. Pure data, found by `weight_map.py`."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Where one stored tensor goes: all of `target`, or part `part` of `parts` of its row `row` (an expert)."""

    target: str
    row: int = -1
    part: int = 0
    parts: int = 1
