"""Sights of engines, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from fdasync.stats import EngineStats, SchedulerStats
from fdasync.telemetry.sight.latencies import Counts, Histogram
from fdasync.telemetry.sight.sight import Moment, Picks, Sight, Watched


def stats(**values: Any) -> EngineStats:
    """An engine's numbers; fields of its scheduler stand beside its own."""
    own = {name: values.pop(name) for name in EngineStats.__struct_fields__ if name in values}
    return EngineStats(**own, scheduler=SchedulerStats(**values))


def sight(**values: Any) -> Sight:
    own = {name: values.pop(name) for name in Sight.__struct_fields__ if name in values}
    return Sight(stats=stats(**values), **own)


def moment(number: int, **values: Any) -> Moment:
    fields: dict[str, Any] = dict.fromkeys(
        ("tokens", "prompt_tokens", "finished", "running", "waiting", "used_blocks"), 0
    )
    return Moment(**{"number": number, "seconds": 5.0, **fields, "hits": (0, 0, 0), **values})


def counts(*seconds: float) -> Counts:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    return histogram.counts


def watched(name: str, role: str = "mixed", shown: Sight | None = None, **values: Any) -> Watched:
    fields: dict[str, Any] = {"address": f"ipc:///run/{name}", "is_up": True, "problem": "", "age_s": 0.1}
    return Watched(**{"name": name, "role": role, "sight": shown, **fields, **values})


def picks(table: Any, version: str = "0", *, counted: int | None = None, rows: int = 1000) -> Picks:
    cells = np.array(table, "<i8")
    seen = rows if counted is None else counted
    return Picks(version, tuple(range(3, 3 + len(cells))), cells.shape[1], rows, seen, cells.tobytes())
