"""Recurrent state on a GPU, as far as steps and copies of a runner deal with it.

Plans where a step's sequences find and leave their states, and moves snapshots between device and host. Knows no layers
and no tokens. Made by `device_executor.py`, and used from its loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapOut
from fdasync.gpu.block_copies import BlockCopies
from fdasync_transformers.execution.states.plan import plan_states
from fdasync_transformers.model.recurrent.pieces import Take

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep, SwapIn
    from fdasync.gpu.kernels.recurrence.spans import PlanSize
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.executor import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.model.recurrent.states import States


class DeviceStates:
    """See the module. Where there is a host tier, its pages of snapshots are pinned until `aclose`."""

    def __init__(self, states: States, size: PlanSize, bound: Bound, services: GpuServices) -> None:
        """`size`: of every step's plan."""
        self._states = states
        self._size = size
        self._table = bound.table
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

    def plan(self, step: RunStep, batch: Batch, arrays: dict[str, NDArray[np.generic]]) -> dict[int, int]:
        """Add what is sent of the step's states to `arrays`.

        Returns lane and place of sequences that start behind a snapshot, and have no tokens in the step: for `begin`.
        Raises InvariantBroken for starts and snapshots that cannot be.
        """
        begun = {}
        for start in step.starts:
            self._states.check_start(start.snapshot, start.num_cached)
            if start.snapshot >= 0:
                begun[self._table.lane_of(start.key)] = start.snapshot
        takes = [Take(self._table.lane_of(take.key), take.position, take.place) for take in step.snapshots]
        if len(batch.positions) or takes:
            arrays.update(plan_states(self._size, batch, begun, takes, self._states.num_lanes))
        return {lane: place for lane, place in begun.items() if lane not in batch.lanes}

    def begin(self, waiting: dict[int, int]) -> None:
        """Queue the copies of snapshots to these lanes, on the current stream: the places may have others by the step
        that computes the sequences' tokens."""
        for lane, place in waiting.items():
            self._states.begin(lane, place)

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
