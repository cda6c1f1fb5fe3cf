"""A step from its plan to its completion, as the scheduler knows it. Pure data.

`step_planner.py` makes it, and attachments add to it; `results.py` takes what it gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.events.actions import Drafts, TakeSnapshot
    from fdasync.scheduler.state.sequence import Sequence


@dataclass(slots=True, eq=False)
class ChunkPlan:
    """A chunk in flight.

    Attributes:
        seq: the sequence that is prefilled.
        start, stop: positions [start, stop) of it.
        last: the chunk ends with the last known token, and samples the next one.
    """

    seq: Sequence
    start: int
    stop: int
    last: bool


@dataclass(slots=True, eq=False)
class StepPlan:
    """A step in flight, frozen when planned.

    Attributes:
        step_id: number of the step.
        chunks: chunks of prefills.
        decodes: sequences that decode, in the runner's order; shared between plans, never written.
        emitters: (row, sequence) of the decodes that give tokens as they come.
        stop_ids: every token id that may end one of the decodes.
        planned_at: engine time.
        full: by key, the room in the block tables of decodes that may have come to its end.
        drafts, own_drafts, snapshots: of the `RunStep` that is made of it; attachments fill them in.
    """

    step_id: int
    decodes: list[Sequence]
    emitters: list[tuple[int, Sequence]]
    stop_ids: frozenset[int]
    planned_at: float
    full: dict[int, int]
    chunks: list[ChunkPlan] = field(default_factory=list)
    drafts: Drafts | None = None
    own_drafts: int | None = None
    snapshots: tuple[TakeSnapshot, ...] = ()
