"""Recurrent state on a GPU, as far as steps and copies of a runner deal with it.

Plans where a step's sequences find and leave their states, and moves snapshots between device and host. Where steps
verify drafts, it is the device that knows which version of its state a lane goes on from, and which snapshots of
sequences that decode a step comes to. Knows no layers and no tokens. Made by `device_executor.py`, and used from its
loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from fdasync_kernels.recurrence.drafts import accept_states, keep_states, place_states
from fdasync_kernels.recurrence.spans import Spans, plan_spans

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapOut
from fdasync.gpu.block_copies import BlockCopies
from fdasync_transformers.execution.states.plan import Spanned, plan_states
from fdasync_transformers.model.recurrent.pieces import Take

if TYPE_CHECKING:
    import asyncio

    from fdasync_kernels.recurrence.spans import PlanSize
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep, SwapIn
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.model.recurrent.states import States


#: of the names of arrays that are sent to the device
STATES = "states."


class PlannedStates(NamedTuple):
    """The planned states of a step.

    Attributes:
        waiting: lane and place of sequences that start behind a snapshot, and have no tokens in the step.
        sequences, decodes: how many sequences have tokens in it, and how many of them decode.
    """

    waiting: dict[int, int]
    sequences: int
    decodes: int


class DeviceStates:
    """See the module. Where there is a host tier, its pages of snapshots are pinned until `aclose`."""

    def __init__(self, states: States, size: PlanSize, bound: Bound, services: GpuServices) -> None:
        """`size`: of every step's plan."""
        self._states = states
        self._size = size
        self._table = bound.table
        self._current = torch.zeros(len(bound.table.length), dtype=torch.int32, device=states.memory.device)
        self._copies = None
        if bound.snapshots is not None:
            self._copies = BlockCopies(
                states.places,
                bound.snapshots,
                services.streams,
                services.events,
                services.port,
                bound.snapshot_part,
            )

    def plan(
        self, step: RunStep, batch: Batch, drafted: StepRows | None, arrays: dict[str, NDArray[np.generic]]
    ) -> PlannedStates:
        """Add what is sent of the step's states to `arrays`. `drafted`: as of `Spanned.of`.

        Raises InvariantBroken for starts and snapshots that cannot be.
        """
        begun = {}
        for start in step.starts:
            self._states.check_start(start.snapshot, start.num_cached)
            if start.snapshot >= 0:
                begun[self._table.lane_of(start.key)] = start.snapshot
        takes = [Take(self._table.lane_of(take.key), take.position, take.place) for take in step.snapshots]
        if drafted is not None:
            takes = self._told_later(takes, drafted, arrays)
            if step.starts:
                begins = [self._table.lane_of(start.key) for start in step.starts]
                arrays[STATES + "begins"] = np.array(begins, np.int64)
        spanned = Spanned.of(batch, drafted)
        if len(spanned.lanes) or takes:
            arrays.update(plan_states(self._size, spanned, begun, takes, self._states))
        waiting = {lane: place for lane, place in begun.items() if lane not in spanned.lanes}
        return PlannedStates(waiting, len(spanned.lanes), spanned.decodes)

    def _told_later(self, takes: list[Take], drafted: StepRows, arrays: dict[str, NDArray[np.generic]]) -> list[Take]:
        """Send the snapshots of decoding sequences apart, for `settle`; returns the others."""
        number_of = {lane: number for number, lane in enumerate(drafted.lanes.tolist())}
        places = self._states.first_place
        later = [(number_of[one.lane], one.position, places + one.place) for one in takes if one.lane in number_of]
        if later:
            arrays[STATES + "takes"] = np.array(later, np.int64)
        return [one for one in takes if one.lane not in number_of]

    def begin(self, planned: PlannedStates, sent: dict[str, torch.Tensor]) -> None:
        """Queue what precedes a step's pass, on the current stream: the copies of snapshots to lanes that wait, since
        the places may have others by the step that computes the sequences' tokens; and, with drafts, which versions
        the step begins from. `sent`: the arrays of `plan`, on the device."""
        for lane, place in planned.waiting.items():
            self._states.begin(lane, place)
        if STATES + "begins" in sent:
            self._current.index_fill_(0, sent[STATES + "begins"], 0)
        if self._states.versions > 1 and planned.decodes:
            spans = Spans.of(sent["spans"], self._size, None, planned.sequences)
            place_states(spans, planned.decodes, self._current, self._states.versions)

    def settle(
        self,
        runs: torch.Tensor,
        decodes: int,
        told: dict[str, torch.Tensor],
        sent: dict[str, torch.Tensor],
    ) -> None:
        """Queue what follows from the samples of a step with drafts: snapshots, and the versions that go on.

        Args:
            runs: int64 [N, columns] of the step, as `RUN_COLUMNS`; the first `decodes` decode.
            told: `starts` and `counts` of `DeviceDrafts.accept`.
            sent: as of `begin`.
        """
        versions, counts = self._states.versions, told["counts"]
        if STATES + "takes" in sent:
            memory = self._states.memory
            keep_states(sent[STATES + "takes"], runs, told["starts"], counts, self._current, memory, versions)
        accept_states(runs, counts, decodes, self._current, versions)

    def warm(self) -> None:
        """Queue the kernels once, so that no step waits while they are compiled; changes nothing."""
        versions, device = self._states.versions, self._current.device
        if versions > 1:
            one = np.ones(1, np.int64)
            plan = torch.from_numpy(plan_spans(self._size, 0 * one, one, one)).to(device)
            place_states(Spans.of(plan, self._size, None, 1), 1, self._current, versions)
            nothing = torch.zeros(1, dtype=torch.int32, device=device)
            takes = torch.zeros((1, 3), dtype=torch.int64, device=device)
            keep_states(takes, takes, nothing, nothing, self._current, self._states.memory, versions)
            accept_states(takes, nothing, 1, self._current, versions)

    def move(self, copy: SwapOut | SwapIn) -> asyncio.Future[int]:
        """Queue a copy of snapshots; as `BlockCopies`. Raises InvariantBroken where it has blocks too."""
        if self._copies is None or copy.device or copy.host:
            raise InvariantBroken(f"copy {copy.copy_id} has snapshots, and blocks too or no places on the host")
        if isinstance(copy, SwapOut):
            return self._copies.out(copy.snapshots, copy.snapshots_host)
        return self._copies.back(copy.snapshots_host, copy.snapshots)

    async def aclose(self) -> None:
        """As `BlockCopies.aclose`."""
        if self._copies is not None:
            await self._copies.aclose()
