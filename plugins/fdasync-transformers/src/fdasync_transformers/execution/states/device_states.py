"""Recurrent state on a GPU, as far as the steps of a runner deal with it.

Plans where a step's sequences find and leave their states. Where steps verify drafts, it is the device that knows which
version of its state a lane goes on from, and which snapshots of sequences that decode a step comes to. Knows no layers
and no tokens. Called as parts are (`parts/step_part.py`), for a model with recurrent layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from fdasync_kernels.recurrence.drafts import accept_states, keep_states, place_states
from fdasync_kernels.recurrence.spans import Spans, plan_spans

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.execution.states.plan import Spanned, plan_states
from fdasync_transformers.model.recurrent.pieces import Take

if TYPE_CHECKING:
    from fdasync_kernels.recurrence.spans import PlanSize

    from fdasync.runner.input_batch import InputBatch
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.execution.parts.step_part import Arrays, StepWork, Tensors
    from fdasync_transformers.model.recurrent.states import States


class PlannedStates(NamedTuple):
    """The planned states of a step.

    Attributes:
        waiting: lane and place of sequences that start behind a snapshot, and have no tokens in the step.
        sequences, decodes: how many sequences have tokens in it, and how many of them decode.
    """

    waiting: dict[int, int]
    sequences: int
    decodes: int


class DeviceStates(StepPart[PlannedStates]):
    """`size`: of every step's plan."""

    name = "states"

    def __init__(self, states: States, size: PlanSize, table: InputBatch) -> None:
        self._states = states
        self._size = size
        self._table = table
        self._current = torch.zeros(len(table.length), dtype=torch.int32, device=states.memory.device)

    def plan(self, work: StepWork) -> PartWork[PlannedStates]:
        """Raises InvariantBroken for starts and snapshots that cannot be."""
        begun, arrays, drafted = {}, dict[str, np.ndarray[Any, Any]](), work.drafted
        for start in work.step.starts:
            self._states.check_start(start.snapshot, start.num_cached)
            if start.snapshot >= 0:
                begun[self._table.lane_of(start.key)] = start.snapshot
        takes = [Take(self._table.lane_of(take.key), take.position, take.place) for take in work.step.snapshots]
        if drafted is not None:
            takes = self._told_later(takes, drafted, arrays)
            if work.step.starts:
                begins = [self._table.lane_of(start.key) for start in work.step.starts]
                arrays["begins"] = np.array(begins, np.int64)
        spanned = Spanned.of(work.batch, drafted)
        if len(spanned.lanes) or takes:
            arrays.update(plan_states(self._size, spanned, begun, takes, self._states))
        waiting = {lane: place for lane, place in begun.items() if lane not in spanned.lanes}
        return PartWork(self, PlannedStates(waiting, len(spanned.lanes), spanned.decodes), arrays)

    def _told_later(self, takes: list[Take], drafted: StepRows, arrays: Arrays) -> list[Take]:
        """Send the snapshots of decoding sequences apart, for `after`; returns the others."""
        number_of = {lane: number for number, lane in enumerate(drafted.lanes.tolist())}
        places = self._states.first_place
        later = [(number_of[one.lane], one.position, places + one.place) for one in takes if one.lane in number_of]
        if later:
            arrays["takes"] = np.array(later, np.int64)
        return [one for one in takes if one.lane not in number_of]

    def before(self, work: StepWork, own: PartWork[PlannedStates]) -> None:
        """Queue what precedes a step's pass: the copies of snapshots to lanes that wait, since the places may have
        others by the step that computes the sequences' tokens; and, with drafts, which versions the step begins from.
        """
        planned, sent = own.plan, own.sent
        for lane, place in planned.waiting.items():
            self._states.begin(lane, place)
        if "begins" in sent:
            self._current.index_fill_(0, sent["begins"], 0)
        if "spans" in sent:
            work.state_plan = sent["spans"], sent.get("owners")
            work.spans = Spans.of(sent["spans"], self._size, sent.get("owners"), planned.sequences)
            if self._states.versions > 1 and planned.decodes:
                place_states(work.spans, planned.decodes, self._current, self._states.versions)

    def after(self, work: StepWork, own: PartWork[PlannedStates]) -> Tensors:
        """Queue what follows from the samples of a step with drafts: snapshots, and the versions that go on."""
        if work.accepted is not None:
            runs, decodes, told = work.accepted
            versions, counts, memory = self._states.versions, told["counts"], self._states.memory
            if "takes" in own.sent:
                keep_states(own.sent["takes"], runs, told["starts"], counts, self._current, memory, versions)
            accept_states(runs, counts, decodes, self._current, versions)
        return {}

    def warm(self) -> None:
        versions, device = self._states.versions, self._current.device
        if versions > 1:
            one = np.ones(1, np.int64)
            plan = torch.from_numpy(plan_spans(self._size, 0 * one, one, one)).to(device)
            place_states(Spans.of(plan, self._size, None, 1), 1, self._current, versions)
            nothing = torch.zeros(1, dtype=torch.int32, device=device)
            takes = torch.zeros((1, 3), dtype=torch.int64, device=device)
            keep_states(takes, takes, nothing, nothing, self._current, self._states.memory, versions)
            accept_states(takes, nothing, 1, self._current, versions)
