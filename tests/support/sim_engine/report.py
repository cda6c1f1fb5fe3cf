"""What a simulation exercised, and what its trace must show. Called by `simulation.py`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.events.actions import FinishRequest
from fdasync.events.catalog import RequestPrepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.events.trace import Turn


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what a simulation exercised.

    Attributes:
        outcomes: number of samples by finish reason, and of cancelled, closed and failed requests.
        long_runs: runs of more than one token of a sequence in a step.
        drafted_tokens, accepted_tokens: drafts of the engine's drafter.
        rows: rows of results that were checked.
        updates: of the weights.
        seconds: of the loop's time.
    """

    outcomes: dict[str, int]
    steps: int
    long_runs: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    evictions: int
    hit_tokens: int
    dropped_tokens: int
    rows: int
    swapped_in_blocks: int
    fetched_blocks: int
    late_blocks: int
    written_blocks: int
    forgotten_blocks: int
    store_faults: int
    damaged_blocks: int
    updates: int
    seconds: float


def add(first: SimulationReport, second: SimulationReport) -> SimulationReport:
    """The counts of two lives together."""
    values: dict[str, Any] = {}
    for name in SimulationReport.__struct_fields__:
        one, other = getattr(first, name), getattr(second, name)
        values[name] = dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other
    return SimulationReport(**values)


def check_groups(turns: Sequence[Turn]) -> None:
    """A request that is cut short ends as a whole: where one of its samples is, all that are left end in that turn."""
    groups: dict[int, set[int]] = {}
    group_of: dict[int, int] = {}
    for turn in turns:
        for event in turn.events:
            if isinstance(event, RequestPrepared):
                group_of[event.key] = event.group
                groups.setdefault(event.group, set()).add(event.key)
        cut: set[int] = set()
        for action in turn.actions:
            if isinstance(action, FinishRequest):
                groups[group_of[action.key]].discard(action.key)
                if action.reason in ("abort", "deadline"):
                    cut.add(group_of[action.key])
        left = [group for group in cut if groups[group]]
        assert not left, f"of requests {left} some samples were cut short, and others went on"
