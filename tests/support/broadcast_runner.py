"""A synthetic runner that joins groups in virtual time: what its trainer broadcasts lies in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync import GroupTensors, TensorMeta, WeightsGroup
from fdasync.errors import WakeFailed, WeightsBroken, WeightsRejected
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import oracle_of

if TYPE_CHECKING:
    from fdasync import EngineConfig, MemoryPart
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.synthetic.oracle import SyntheticConfig

GROUP = WeightsGroup(name="trainer", address="127.0.0.1", port=29500, world_size=2)
LOW = TensorMeta("weights.low", "uint32", (1,))
HIGH = TensorMeta("weights.high", "uint32", (1,))
HALF = 1 << 32


def halves(number: int, *names: str) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Tensors of the weights of this number: the named halves, "low" and "high"."""
    values = {"low": number % HALF, "high": number // HALF}
    return [(f"weights.{name}", "uint32", (1,), values[name].to_bytes(4, "little")) for name in names or values]


def part(*metas: TensorMeta) -> GroupTensors:
    return GroupTensors(group=GROUP.name, tensors=metas or (LOW, HIGH))


class BroadcastRunner(SyntheticRunner):
    """See the module.

    Attributes:
        sends: the weights that the trainer's next broadcasts are of.
        dies: the trainer dies in the middle of its next broadcast.
        groups: names of the groups that are joined.
        gone: names of folders that nobody finds any more.
        reach_s, meet_s: what the store of a group takes to answer, and its ranks to meet (0: `load_s`).
        fails_wakes: so many parts cannot be taken back before the next one that can.
    """

    def __init__(self, config: SyntheticConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self.sends = 0
        self.dies = False
        self.groups: set[str] = set()
        self.gone: set[str] = set()
        self.reach_s = self.meet_s = 0.0
        self.fails_wakes = 0
        self._came = 0
        self._missing = 0

    async def load_folder(self, path: str) -> str:
        self._find(path)
        return await super().load_folder(path)

    async def delta_base(self, path: str) -> str:
        self._find(path)
        return await super().delta_base(path)

    def _find(self, path: str) -> None:
        if Path(path).name in self.gone:
            raise WeightsRejected(f"{path}: there is no such folder")

    async def regain_memory(self, part: MemoryPart) -> None:
        if self.fails_wakes:
            self.fails_wakes -= 1
            raise WakeFailed(part, "it was told to fail")
        await super().regain_memory(part)

    async def reach_group(self, group: WeightsGroup) -> None:
        await asyncio.sleep(self.reach_s)

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, stop: int = -1) -> None:
        await asyncio.sleep(self.meet_s or self.config.load_s)
        self.groups.add(group.name)

    async def leave_group(self, name: str) -> None:
        await asyncio.sleep(self.config.load_s)
        self.groups.discard(name)

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        if source.group not in self.groups:
            raise WeightsRejected(f"no group {source.group!r} was joined")
        if first:
            self._came, self._missing = 0, self._owed
        try:
            room = self._checked(source.tensors, self._missing & ~self._came if last else 0)
            sent = {name: data for name, _, _, data in halves(self.sends)}
            incoming = [(one, sent[meta.name]) for (one, _), meta in zip(room, source.tensors, strict=True)]
            for one, _ in incoming:
                self._torn |= one
            self._loading = True
            await asyncio.sleep(self.config.load_s)
            if self.dies:
                self.dies = False
                raise WeightsBroken("the trainer died")
        except BaseException:
            self.groups.discard(source.group)
            raise
        self.weights_id = self._replaced([(one, bytearray(data)) for one, data in incoming])
        self._came |= sum(one for one, _ in incoming)
        if last:
            await self._load(self.weights_id)

    async def end_received(self) -> None:
        if self._missing & ~self._came:
            raise WeightsBroken("these tensors leave out some that were dropped, or that an update left unfinished")
        await self._load(self.weights_id)


def runner_of(config: EngineConfig) -> BroadcastRunner:
    return BroadcastRunner(oracle_of(config).config, config.runner_limits())
