"""Compares two arms of a benchmark that moved the same bytes. Used by the benchmarks of transports and stores."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.lib.report import Report


def add_ratio(
    report: Report, name: str, nbytes: int, ours_s: Sequence[float], raw_s: Sequence[float], aim: float | None = None
) -> None:
    """Add the ratio of the medians of MB/s. The median, least and most MB/s of both arms go to the conditions."""
    ours, raw = ([nbytes / 1e6 / seconds for seconds in arm] for arm in (ours_s, raw_s))
    middle = statistics.median(raw)
    report.add(name, [rate / middle for rate in ours], aim=aim)
    report.conditions[f"{name}_mb_s"] = {
        arm: [round(value, 1) for value in (statistics.median(rates), min(rates), max(rates))]
        for arm, rates in (("ours", ours), ("raw", raw))
    }
