"""The parts of `gpu_exact`: which function of `plays.py` each of them plays, and how its engines are set.

Imports no plays, which would import Triton. Used by `exact.py` and `verdicts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a part plays: a function of `plays.py`, and what it takes beside the play."""

    play: str
    values: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False


def kinds(ranks: int) -> dict[str, Kind]:
    """All parts by name; those of ranks where there are several."""
    inline = {"process": "inline"}
    plain = {**inline, "fused": False, "pipeline_depth": 1, "whole": True}
    worker = {"process": "worker", "fused": False}
    group = {"process": "worker", "tensor_parallel": ranks}
    of_ranks = {
        "ranks": Kind("tight", group),
        "ranks_update": Kind("updated", group),
        "ranks_store": Kind("stored", group),
        "bf16_ranks": Kind("tight", group, bf16=True),
    }
    return (of_ranks if ranks > 1 else {}) | {
        "tight": Kind("tight", inline),
        "plain": Kind("tight", plain),
        "store": Kind("stored"),
        "update": Kind("updated", inline),
        "worker": Kind("tight", worker),
        "pd_shm": Kind("apart", {"transport": "shm"}),
        "pd_tcp": Kind("apart", {"transport": "tcp", "pipeline_depth": 1}),
        "pd_device": Kind("apart", {"transport": "device"}),
        "bf16_tight": Kind("tight", inline, bf16=True),
        "bf16_plain": Kind("tight", plain, bf16=True),
        "bf16_worker": Kind("tight", worker, bf16=True),
    }
