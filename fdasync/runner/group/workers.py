"""A group of worker processes: one `WorkerRunner` for each rank, and the memory through which the ranks meet.

New weights from memory go through chunks that all ranks map, so the engine copies each byte once. A process that dies
or does not answer is named with its rank. Knows no model. Made by `engine/runtime.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.ipc.child import is_stopped
from fdasync.ipc.exchange import Meeting
from fdasync.runner.group.group import GroupRunner
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.runner.worker.weight_transfer import CHUNK_NBYTES, TensorTransfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync.runner.base import Capacity, RunnerLimits, TensorMeta


class WorkerGroup(GroupRunner):
    """See the module.

    Args:
        name: entry-point name of the runner; it is imported in the children only.
        config: its raw configuration, the same for all ranks.
        limits: `tensor_parallel` of them are the ranks.
        close_deadline_s: how long an idle worker may take to end before it is killed.
        exchange_deadline_s: how long a rank waits for the others in an exchange. Longer than the caller's own
            deadlines: those name the rank that is behind.
        chunk_nbytes: bound on each of the two chunks that tensors cross in.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        limits: RunnerLimits,
        *,
        close_deadline_s: float,
        exchange_deadline_s: float,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._workers = [
            WorkerRunner(name, config, msgspec.structs.replace(limits, rank=rank), close_deadline_s=close_deadline_s)
            for rank in range(limits.tensor_parallel)
        ]
        super().__init__(self._workers)
        self._exchange_deadline_s = exchange_deadline_s
        self._meeting: Meeting | None = None
        self._transfer = TensorTransfer([worker.ask_now for worker in self._workers], chunk_nbytes, self._named)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; -1 before `open`."""
        return tuple([worker.pid for worker in self._workers])

    def place(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Set what each rank's environment says beside this process's own; before `open`."""
        for worker, environment in zip(self._workers, environments, strict=True):
            worker.place([environment])

    async def open(self) -> Capacity:
        """See `Runner`. Raises OSError where memory or descriptors run out."""
        self._meeting = Meeting(len(self._workers))
        for worker in self._workers:
            worker.meet(self._meeting, self._exchange_deadline_s)
        return await super().open()

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        await self._transfer.begin(tensors, partial(self._change, "checking tensors"))

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        await self._transfer.write(number, offset_nbytes, data)

    async def end_tensors(self) -> None:
        await self._transfer.end(partial(self._change, "ending an update"))

    def _stopped(self) -> list[int]:
        return [rank for rank, worker in enumerate(self._workers) if is_stopped(worker.pid)]

    def _progress(self) -> dict[str, list[int]]:
        if self._meeting is None:
            return {}
        return {"exchanges entered": self._meeting.entered(), "steps begun": self._meeting.begun()}

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            self._transfer.close()
            if self._meeting is not None:
                self._meeting.close()
                self._meeting = None
