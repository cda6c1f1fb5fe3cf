"""Sleeps of the whole fleet under load, and wakes that fail.

The fleet sleeps at level 1 or 2, with `keep` or `abort`, with all parts of memory or some, and is woken at once or part
by part. A wake fails where an instance does not get its memory back, or where the folder of dropped weights is gone:
then the fleet must sleep on, or be paused, and say so; a second wake, or an update, mends it. Requests that waited go
on, and are held against the oracle. Used by `faults.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fdasync.errors import FdasyncError, WakeFailed, WeightsRejected
from tests.nightly.chaos.notes import Stage
from tests.nightly.chaos.runner import wake_order
from tests.nightly.chaos.weights import GRACE_S, WeightFaults

if TYPE_CHECKING:
    from fdasync.request import MemoryPart
    from tests.nightly.chaos.node import Node

SLEEP, WAKE_FAILS, FOLDER_GONE = "sleep", "wake fails", "wake without folder"
_GRAPHS: MemoryPart = "cuda_graph"
_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache", _GRAPHS)
_SOME: tuple[tuple[MemoryPart, ...], ...] = (("kv_cache",), ("weights",), ("kv_cache", _GRAPHS))
# until a fleet that was woken has no instance that sleeps: one may be stopped, or out of reach, for a while
_AWAKE_S = 40.0


@dataclass(eq=False)
class SleepFaults(Stage):
    """See the module. `weights` mends the fleet."""

    weights: WeightFaults

    async def play(self, kind: str) -> None:
        rng = self.rng
        level: Literal[1, 2] = 2 if kind == FOLDER_GONE else rng.choice((1, 1, 2))
        mode: Literal["keep", "abort"] = rng.choice(("keep", "keep", "abort"))
        tags = None if kind == FOLDER_GONE or rng.random() < 0.6 else rng.choice(_SOME)
        members = await self._fall_asleep(kind, level, mode, tags)
        await asyncio.sleep(rng.uniform(0.3, 3.0))
        began = asyncio.get_running_loop().time()
        if kind == WAKE_FAILS:
            await self._fail_wake(members)
        elif kind == FOLDER_GONE:
            await self._lose_folder(members)
        elif rng.random() < 0.5:
            await self._wake_parts(members, tags or _PARTS)
        await self._until_awake(kind)
        self.notes.add("wake_s", asyncio.get_running_loop().time() - began)
        await self.notes.recovered(kind)

    async def _fall_asleep(
        self, kind: str, level: Literal[1, 2], mode: Literal["keep", "abort"], tags: tuple[MemoryPart, ...] | None
    ) -> dict[Node, int]:
        """Returns the instances that sleep, with the numbers of their processes."""
        members = {node: node.starts for node in self.fleet.nodes.values() if self._is_at_hand(node, node.starts)}
        whole = False
        try:
            with self.versions.aborts.open(GRACE_S) if mode == "abort" else nullcontext():
                await self.router.sleep(level, mode, tags=tags)
            whole = True
        except FdasyncError as error:
            # an instance is stopped, or out of reach
            self.notes.played[f"sleep: {type(error).__name__}"] += 1
        wanted = set(tags or _PARTS)
        asleep: dict[Node, int] = {}
        for node, starts in members.items():
            probe = await node.probe()
            if probe is None or node.starts != starts:
                continue
            if probe.asleep and set(probe.released) == wanted:
                asleep[node] = starts
            elif whole and self._is_at_hand(node, starts):
                self.notes.wrong.append(
                    f"{kind}, level {level}: {node.name} is {'asleep' if probe.asleep else 'awake'},"
                    f" {probe.released} released, not {sorted(wanted)}"
                )
        if asleep:
            self.notes.struck[SLEEP] += 1
            self.notes.played[f"asleep at level {level}, {mode}, {'all' if tags is None else 'some'} parts"] += 1
            if whole and not self.router.load().asleep:
                self.notes.wrong.append(f"{kind}: {len(asleep)} instances sleep, and the router does not say so")
        return asleep

    def _is_at_hand(self, node: Node, starts: int) -> bool:
        """No fault strikes it, and the router has a link to it."""
        up = {one.address for one in self.router.load().instances if one.is_up}
        return node.is_up and node.starts == starts and node.address in up

    async def _wake_parts(self, members: dict[Node, int], parts: tuple[MemoryPart, ...]) -> None:
        """All parts but one come back: the instances sleep on. Graphs come back with the last of the others."""
        order = [part for part in parts if part != _GRAPHS]
        self.rng.shuffle(order)
        missing = order.pop()
        if _GRAPHS in parts:
            order.insert(self.rng.randint(0, len(order)), _GRAPHS)
        for part in order:
            await self._try_wake((part,))
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
        if order:
            for node, starts in members.items():
                probe = await node.probe()
                if probe is not None and self._is_at_hand(node, starts) and not probe.asleep:
                    self.notes.wrong.append(f"sleep: {node.name} is awake without {missing}")

    async def _try_wake(self, tags: tuple[MemoryPart, ...] | None = None) -> FdasyncError | None:
        try:
            await self.router.wake(tags)
        except FdasyncError as error:
            return error
        return None

    async def _fail_wake(self, members: dict[Node, int]) -> None:
        """Some instances do not get a part of their memory back."""
        chosen = self.rng.sample(
            sorted(members, key=lambda node: node.name), k=min(len(members), self.rng.choice((1, 2)))
        )
        orders = {}
        for node in chosen:
            pids = node.rank_pids()
            if pids:
                orders[node] = wake_order(self.fleet.orders, self.rng.choice(pids))
                orders[node].touch()
        error = await self._try_wake()
        struck = [node for node, order in orders.items() if not order.exists()]
        for order in orders.values():
            order.unlink(missing_ok=True)
        for node in struck:
            probe = await node.probe()
            if probe is None or not self._is_at_hand(node, members[node]):
                continue
            if not probe.asleep or not self.router.load().asleep:
                self.notes.wrong.append(f"{WAKE_FAILS}: {node.name} failed to wake, and nobody says that it sleeps")
            if error is None:
                self.notes.wrong.append(f"{WAKE_FAILS}: {node.name} failed to wake, and the call did not")
        if struck and isinstance(error, WakeFailed):
            self.notes.struck[WAKE_FAILS] += 1
        elif error is not None:
            self.notes.played[f"{WAKE_FAILS}: {type(error).__name__}"] += 1

    async def _lose_folder(self, members: dict[Node, int]) -> None:
        """The folder of dropped weights is gone. It comes back and they are woken again, or an update brings others."""
        with self.fleet.without_weights():
            error = await self._try_wake()
            told = 0
            for node, starts in members.items():
                probe = await node.probe()
                if probe is None or not self._is_at_hand(node, starts):
                    continue
                if not probe.dropped or not probe.paused:
                    self.notes.wrong.append(f"{FOLDER_GONE}: {node.name} goes on: paused {probe.paused}")
                told += probe.dropped
            if told and isinstance(error, WeightsRejected):
                self.notes.struck[FOLDER_GONE] += 1
            elif error is not None:
                self.notes.played[f"{FOLDER_GONE}: {type(error).__name__}"] += 1
        if self.rng.random() < 0.5:
            await self._try_wake()
        # an instance that came up meanwhile waits for an update
        await self.weights.mend(FOLDER_GONE)

    async def _until_awake(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _AWAKE_S
        error = await self._try_wake()
        while True:
            left = []
            for node in list(self.fleet.nodes.values()):
                # the router wakes one that was out of its reach when it is back
                probe = await node.probe() if node.ready.is_set() else None
                if probe is not None and (probe.asleep or probe.dropped):
                    left.append(f"{node.name} ({', '.join(probe.released) or 'no weights'})")
            if error is None and not left:
                return
            if loop.time() > until:
                self.notes.wrong.append(f"{kind}: after {_AWAKE_S:g} s {left} sleep: {error}")
                return
            await asyncio.sleep(0.3)
            if error is not None:
                # an instance has answered that it did not wake: that is its caller's to mend
                error = await self._try_wake()
