"""Trainers that die or stop in the middle of a broadcast, under load.

A trainer is a process of its own (`trainer.py`) that joins a gloo group with every process that computes, and
broadcasts tensors to them. Where it dies, all instances must say that their weights are broken (`WeightsBroken`) and
plan no step; an update by another trainer, or from a folder, must mend them. A trainer's tensors come once, so the same
weights follow from a folder, and instances that start later have them. Used by `faults.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import FdasyncError, RemoteError, WeightsBroken
from fdasync.request import GroupTensors, WeightsGroup
from fdasync.testing.harness.engines import until
from tests.nightly.chaos.notes import Stage
from tests.nightly.chaos.runner import METAS, PARTS, warm_order
from tests.nightly.chaos.weights import GRACE_S, WeightFaults

if TYPE_CHECKING:
    from tests.nightly.chaos.child import Probe
    from tests.nightly.chaos.node import Node

DIES, STOPS = "trainer dies", "trainer stops"
_ROOT = Path(__file__).parents[3]
# imports of torch by all processes of a fleet on two cores
_WARM_S = 120.0
_LINE_S = 60.0
# of a group, as instances are told: how long the next bytes may take to come
_GROUP_S = 3.0
# from the death of a trainer, or the end of the group's limit, until all instances have said so
_BROKEN_S = 4.0
_CALM_S = 10.0


class Trainer:
    """A process of `trainer.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, log: Path) -> Trainer:
        """It says that it is ready some seconds later."""
        with log.open("ab") as errors:
            return cls(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.nightly.chaos.trainer", cwd=_ROOT,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                )
            )  # fmt: skip

    async def aclose(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def line(self) -> dict[str, Any]:
        """What it says next. Raises RemoteError where it had an error, or is gone."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _LINE_S)
        said = dict(json.loads(line)) if line else {"error": "it is gone"}
        if "error" in said:
            raise RemoteError("trainer", "Trainer", said["error"])
        return said

    async def ask(self, what: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        return await self.line()

    async def ended(self) -> int:
        return await asyncio.wait_for(self._process.wait(), _LINE_S)


@dataclass(eq=False)
class TrainerFaults(Stage):
    """See the module. `weights` mends the fleet."""

    weights: WeightFaults

    def __post_init__(self) -> None:
        self._groups = 0
        # of the group that met last, with the numbers of their processes
        self._members: dict[Node, int] = {}
        self._warm: set[int] = set()
        self._idle: list[Trainer] = []

    async def aclose(self) -> None:
        for trainer in self._idle:
            await trainer.aclose()

    async def play(self, kind: str) -> None:
        """A trainer goes away half-way, by SIGKILL or by doing nothing any more; the next update mends the fleet."""
        by_trainer = self.rng.random() < 0.5
        first, second = self._idle
        self._idle = []
        try:
            began = asyncio.get_running_loop().time()
            await self._warm_each()
            for trainer in (first, second):
                await trainer.line()
            self.notes.add("trainer_waits_for_torch_s", asyncio.get_running_loop().time() - began)
            await self._play(kind, [first, second], by_trainer=by_trainer)
        finally:
            await first.aclose()
            await second.aclose()
            await self._start_trainers()

    async def _start_trainers(self) -> None:
        """For the next time: torch takes them seconds."""
        self._idle = [await Trainer.start(self.fleet.folder / "trainer.log") for _ in range(2)]

    async def _play(self, kind: str, trainers: list[Trainer], *, by_trainer: bool) -> None:
        group = None
        while group is None and trainers:
            first = trainers.pop(0)
            group = await self._meet(first)
        if group is None:
            return
        with self.versions.broken.open(GRACE_S):
            if not await self._break(kind, first, group):
                # an instance was lost at the same moment, maybe: what the others have is unknown
                await self.weights.mend(kind)
                return
            # those that are inside wait, and others are refused
            await asyncio.sleep(self.rng.uniform(0.0, 1.5))
            began = asyncio.get_running_loop().time()
            by_group = by_trainer and bool(trainers) and await self._bring(kind, trainers.pop())
            if not by_group and not await self.weights.mend(kind):
                return
            self.notes.add("mend_s", asyncio.get_running_loop().time() - began)
        await self.notes.recovered(kind)
        if by_group:
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            await self._follow(kind)
            await self.notes.recovered(kind)

    async def _warm_each(self) -> None:
        """Have every process that computes import torch, one after the other: more would take the CPUs from the
        steps."""
        async with asyncio.timeout(_WARM_S):
            while cold := [
                pid for node in self.fleet.nodes.values() for pid in node.rank_pids() if pid not in self._warm
            ]:
                await self._warm_one(cold[0])

    async def warm_all(self) -> None:
        """The same while there is no load, all at once; trainers start, too."""
        if not self._idle:
            await self._start_trainers()
        pids = [pid for node in self.fleet.nodes.values() for pid in node.rank_pids() if pid not in self._warm]
        async with asyncio.timeout(_WARM_S):
            await asyncio.gather(*map(self._warm_one, pids))

    async def _warm_one(self, pid: int) -> None:
        order = warm_order(self.fleet.orders, pid)
        order.touch()
        await until(lambda: not _is_cold(order, pid), _WARM_S, 0.05)
        self._warm.add(pid)

    async def _meet(self, trainer: Trainer) -> WeightsGroup | None:
        """A group of the trainer and all instances that are up; None: they did not meet, and the trainer is used up."""
        loop = asyncio.get_running_loop()
        self.weights.calm = True
        try:
            with suppress(TimeoutError):
                await until(lambda: all(node.is_up for node in self.fleet.nodes.values()), _CALM_S, 0.05)
            await self._warm_each()
            self._groups += 1
            up = {one.address for one in self.router.load().instances if one.is_up}
            self._members = {node: node.starts for node in self.fleet.nodes.values() if node.address in up}
            ranks = sum(node.config.tensor_parallel for node in self._members)
            opened = await trainer.ask("open", world=1 + ranks, name=f"group-{self._groups}")
            group = msgspec.structs.replace(msgspec.convert(opened["group"], WeightsGroup), timeout_s=_GROUP_S)
            joining = loop.create_task(trainer.ask("join"))
            try:
                await self.router.join_weights_group(group)
                await joining
            except FdasyncError as error:
                # the trainer waits on for the others, and is of no use any more
                self.notes.played[f"trainer: did not meet, {type(error).__name__}"] += 1
                joining.cancel()
                await asyncio.wait([joining])
                return None
            return group
        finally:
            self.weights.calm = False

    @staticmethod
    def _tensors(group: WeightsGroup) -> GroupTensors:
        return GroupTensors(group=group.name, tensors=METAS, bucket_nbytes=0, checksum=True)

    async def _break(self, kind: str, trainer: Trainer, group: WeightsGroup) -> bool:
        """Begin an update that the trainer does not end; whether all instances say so."""
        loop = asyncio.get_running_loop()
        # no token may ever have this label: `Versions` is not told
        label = self.weights.new_label()
        update = loop.create_task(self.router.update_weights(label, self._tensors(group), "keep"))
        number = self.weights.new_number()
        at = loop.time()
        try:
            await trainer.ask("send", number=number, until=self.rng.randrange(1, PARTS), dies=kind == DIES)
            at = loop.time()
            if kind == DIES:
                await trainer.ended()
        except RemoteError:
            # an instance was lost before it came so far
            self.notes.played[f"{kind}: not so far"] += 1
        await asyncio.wait([update])
        took = loop.time() - at
        error = update.exception()
        if error is None:
            self.notes.wrong.append(f"{kind}: the update succeeded")
            return False
        if not isinstance(error, WeightsBroken):
            self.notes.played[f"{kind}: {type(error).__name__}"] += 1
            if not isinstance(error, FdasyncError):
                raise error
            return False
        limit_s = _BROKEN_S + (_GROUP_S if kind == STOPS else 0.0)
        if took > limit_s and all(node.is_up for node in self._members):
            self.notes.wrong.append(f"{kind}: instances said so after {took:.1f} s, not {limit_s:g}")
        self.notes.add("broken_s" if kind == DIES else "broken_by_silence_s", took)
        broken = 0
        for node, starts in self._members.items():
            probe = await self._told(node)
            if probe is None or node.starts != starts or not node.is_up:
                continue
            if probe.update[0] != label:
                # out of the router's reach at the time: it has the weights that it had
                self.notes.played[f"{kind}: an instance was not told"] += 1
            elif not probe.broken or not probe.paused:
                self.notes.wrong.append(
                    f"{kind}: {node.name} goes on: broken {probe.broken!r}, paused {probe.paused}, {probe.update}"
                )
            broken += bool(probe.broken)
        self.notes.struck[kind] += bool(broken)
        return True

    async def _told(self, node: Node) -> Probe | None:
        """What an instance holds that must hear of broken weights: one that was stopped reads late what its worker
        told it, and is paused until then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _BROKEN_S
        while (  # noqa: ASYNC110 - another process is asked
            (probe := await node.probe()) is not None and probe.paused and not probe.broken and loop.time() < end
        ):
            await asyncio.sleep(0.05)
        return probe

    async def _bring(self, kind: str, trainer: Trainer) -> bool:
        """A whole update by a trainer; False: it did not come about."""
        group = await self._meet(trainer)
        if group is None:
            return False
        label, number = self.weights.new_label(), self.weights.new_number()
        self.versions.begins(label, number)
        sending = asyncio.get_running_loop().create_task(trainer.ask("send", number=number))
        try:
            await self.router.update_weights(label, self._tensors(group), "keep")
        except FdasyncError as error:
            self.notes.played[f"{kind}: mending by a trainer, {type(error).__name__}"] += 1
            return False
        finally:
            await asyncio.wait([sending], timeout=_LINE_S)
            sending.exception()
        self.weights.number = number
        self.versions.agreed(label)
        self.notes.struck["update by a trainer"] += 1
        with suppress(FdasyncError):
            await self.router.leave_weights_group(group.name)
        return True

    async def _follow(self, kind: str) -> None:
        """The same weights from a folder."""
        try:
            await self.weights.from_folder(self.weights.number)
        except FdasyncError:
            await self.weights.mend(kind)


def _is_cold(order: Path, pid: int) -> bool:
    """The process has not done what the order asks for, and lives."""
    return order.exists() and Path(f"/proc/{pid}").exists()
