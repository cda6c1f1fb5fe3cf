"""Copies of blocks and of snapshots between the device and the host tier. Rows stay in their slots.

Knows no steps. Made and called by `executor.py`, from its loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.gpu.block_copies import BlockCopies

if TYPE_CHECKING:
    import asyncio

    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.gpu_services import GpuServices
    from fdasync_transformers.model.recurrent.states import States


class DeviceCopies:
    """See the module. The pages of the host tier are pinned until `aclose`.

    Args:
        states: of recurrent layers, whose snapshots are copied; None: the model has none.
    """

    def __init__(self, bound: Bound, states: States | None, services: GpuServices) -> None:
        streams, events, port = services.streams, services.events, services.port
        self._table = bound.table
        self._blocks: BlockCopies | None = None
        self._snapshots: BlockCopies | None = None
        try:
            if bound.host is not None:
                self._blocks = BlockCopies(bound.pool.blocks, bound.host, streams, events, port, bound.part)
            if states is not None and bound.snapshots is not None:
                places, part = states.places, bound.snapshot_part
                self._snapshots = BlockCopies(places, bound.snapshots, streams, events, port, part)
        except BaseException:  # raised again: nobody else has the pinned pages
            self.unpin()
            raise

    def move(self, copy: SwapOut | SwapIn) -> asyncio.Future[int]:
        """Queue a copy; its bytes. Raises InvariantBroken where there is no tier for it, or it has blocks and
        snapshots."""
        if copy.snapshots:
            if self._snapshots is None or copy.device or copy.host:
                raise InvariantBroken(f"copy {copy.copy_id} has snapshots, and blocks too or no places on the host")
            if isinstance(copy, SwapOut):
                return self._snapshots.out(copy.snapshots, copy.snapshots_host)
            return self._snapshots.back(copy.snapshots_host, copy.snapshots)
        if self._blocks is None:
            raise InvariantBroken("a copy, and there is no host tier")
        if isinstance(copy, SwapOut):
            return self._blocks.out(copy.device, copy.host)
        moved = self._blocks.back(copy.host, copy.device)
        self._table.place(copy.device, copy.slots, copy.generations)
        return moved

    def unpin(self) -> None:
        """Where no copy was made yet."""
        for copies in (self._blocks, self._snapshots):
            if copies is not None:
                copies.unpin()

    async def aclose(self) -> None:
        """As `BlockCopies.aclose`, of both."""
        try:
            if self._blocks is not None:
                await self._blocks.aclose()
        finally:
            if self._snapshots is not None:
                await self._snapshots.aclose()
