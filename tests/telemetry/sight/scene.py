"""Sights of engines, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from fdasync.telemetry.sight.latencies import Counts, Histogram
from fdasync.telemetry.sight.sight import Moment, Picks, Sight, Watched


def sight(**values: Any) -> Sight:
    fields: dict[str, Any] = dict.fromkeys(
        (
            "waiting_for_place", "waiting", "running", "leased", "hand_offs", "queued_tokens", "steps_in_flight",
            "num_blocks", "idle_blocks", "free_blocks", "num_host_blocks", "free_host_blocks", "num_slots",
            "free_slots", "writing_blocks", "steps", "tokens", "prompt_tokens", "finished", "preemptions",
            "received_blocks",
        ),
        0,
    )  # fmt: skip
    fields |= {"state": "running", "weight_version": "0", "hits": (0, 0, 0), "leases": (0, 0, 0)}
    return Sight(**{**fields, **values})


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
