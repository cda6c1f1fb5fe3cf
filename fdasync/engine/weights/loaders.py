"""Bring the content of a source to the runner: a folder by its path, tensors in pieces, a group's by the workers.

Checks nothing but what the runner checks. Called by the modules of this room that change weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fdasync.engine.weights.source import ITEM_NBYTES, tensors_of

if TYPE_CHECKING:
    from fdasync.engine.runtime import Runtime
    from fdasync.request import GroupTensors, WeightSource
    from fdasync.runner.base import TensorMeta

#: loads a source and returns its weights id; "": it is not known
Loader = Callable[[], Awaitable[str]]

# bytes handed to the runner at a time: other tasks of the loop run in between
_PIECE_NBYTES = 8 << 20
# of the deadline of an update, what a worker has: it tells what went wrong before the engine ends it
_WORKER_SHARE = 0.9


class Loaders:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def folder(self, path: str) -> Loader:
        return lambda: self._runtime.runner.load_folder(path)

    def tensors(self, source: WeightSource, *, whole: bool) -> Loader:
        """Raises BadInput for an object that is no source. `whole`: fewer than all tensors are refused."""
        checked = tensors_of(source)
        metas, buffers = [meta for meta, _ in checked], [data for _, data in checked]
        return lambda: self._load_tensors(metas, buffers, whole=whole)

    def group(self, part: GroupTensors, *, whole: bool) -> Loader:
        return lambda: self.receive(part, first=True, last=True, whole=whole)

    async def receive(self, part: GroupTensors, *, first: bool, last: bool, whole: bool) -> str:
        """See `Runner.receive_tensors`. `whole`: the update is refused unless it brings all tensors."""
        if first and whole:
            await self._runtime.runner.forget_weights()
        limit_s = _WORKER_SHARE * self._runtime.update_limit_s
        await self._runtime.runner.receive_tensors(part, limit_s, first=first, last=last)
        return ""

    async def end_received(self) -> str:
        """See `Runner.end_received`."""
        await self._runtime.runner.end_received()
        return ""

    async def _load_tensors(self, metas: list[TensorMeta], buffers: list[memoryview], *, whole: bool) -> str:
        runner = self._runtime.runner
        if whole:
            await runner.forget_weights()
        await runner.begin_tensors(metas)
        for number, (meta, data) in enumerate(zip(metas, buffers, strict=True)):
            piece = max(_PIECE_NBYTES // ITEM_NBYTES[meta.dtype], 1) * ITEM_NBYTES[meta.dtype]
            for first in range(0, len(data), piece):
                await runner.write_tensor(number, first, data[first : first + piece])
                await asyncio.sleep(0)
        await runner.end_tensors()
        return ""
