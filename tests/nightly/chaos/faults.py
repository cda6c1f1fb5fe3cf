"""What the chaos harness does to a fleet: kills, stops, cuts, stalls, joins and drains, drawn from a seed.

At any time at least one prefill and one decode instance are left alone. Used by `chaos.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from fdasync_fleet.transfer.process.proxy import STOP_S

from fdasync.errors import BadInput, PeerUnreachable
from fdasync.testing.harness.engines import until
from tests.nightly.chaos.fleet import LOST_S, STEP_LIMIT_S, TTL_S
from tests.nightly.chaos.node import START_S, STORE, TRANSFER, WORKER
from tests.nightly.chaos.sleeps import FOLDER_GONE, SLEEP, WAKE_FAILS, SleepFaults
from tests.nightly.chaos.trainers import DIES, STOPS, TrainerFaults
from tests.nightly.chaos.weights import WeightFaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.nightly.chaos.node import Node
    from tests.nightly.chaos.notes import Stage
    from tests.nightly.chaos.proxy import Proxy

# of a failed engine: `fdasync serve` ends with 1
_FAILED = 1
_KILLED = -signal.SIGKILL
_GAP_S = 1.2
_DRAIN_S = 30.0


#: kinds of faults of the whole fleet that are to be seen to strike; a group is between processes of one host
OF_GROUPS = (DIES, STOPS)
OF_SLEEPS = (SLEEP, WAKE_FAILS, FOLDER_GONE)
_UPDATE = "update weights"

# of a draw, unless one is being played
_WHOLE_SHARE = 0.25

# weight, name, and what it does to a node
_Kind: TypeAlias = "tuple[int, str, Callable[[Node], Awaitable[None]]]"


class Director:
    """See the module.

    Args:
        stage: what they act on.
        only: kinds of faults that are played; (): all.

    Attributes:
        weights, trainers: change those of the fleet.
    """

    def __init__(self, stage: Stage, only: Sequence[str] = ()) -> None:
        self.weights = WeightFaults(**vars(stage))
        self.trainers = TrainerFaults(**vars(stage), weights=self.weights)
        self._sleeps = SleepFaults(**vars(stage), weights=self.weights)
        self._fleet, self._router, self._rng, self._notes = stage.fleet, stage.router, stage.rng, stage.notes
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = 0
        self._spare = ""
        kinds: list[_Kind] = [
            (3, "kill", self._kill),
            (3, "stop short", lambda node: self._stop(node, 0.2, 0.7 * TTL_S)),
            (3, "stop beyond the lease", lambda node: self._stop(node, 1.1 * TTL_S, 0.8 * LOST_S)),
            (2, "stop beyond the link", lambda node: self._stop(node, 1.1 * LOST_S, 2 * LOST_S)),
            (2, "kill worker", partial(self._kill_child, module=WORKER)),
            (1, "kill transfer", partial(self._kill_child, module=TRANSFER)),
            (1, "stop transfer short", lambda node: self._stop_child(node, TRANSFER, 0.1, 1.0)),
            (1, "stop transfer long", lambda node: self._stop_child(node, TRANSFER, 2.0, 0.9 * STOP_S)),
            (1, "stop worker short", lambda node: self._stop_child(node, WORKER, 0.1, STEP_LIMIT_S / 2)),
            (1, "stop worker for good", self._stick_worker),
            # of a group: one of its workers
            (2, "kill rank", partial(self._kill_child, module=WORKER)),
            (1, "stop rank short", lambda node: self._stop_child(node, WORKER, 0.1, STEP_LIMIT_S / 2)),
            (1, "stop rank for good", self._stick_worker),
            (2, "kill store", self._kill_store),
            (1, "stop store short", lambda node: self._stop_child(node, STORE, 0.1, 1.0)),
            (1, "stop store long", lambda node: self._stop_child(node, STORE, 4.0, 7.0)),
            *(self._of_proxies() if stage.fleet.hosts is None else self._of_wires()),
            (2, "join or drain", self._join_or_drain),
        ]
        self._kinds = [one for one in kinds if not only or one[1] in only]
        # a group is between processes of one host
        whole: tuple[str, ...] = (_UPDATE, *(OF_GROUPS if stage.fleet.hosts is None else ()), *OF_SLEEPS)
        self._whole = [kind for kind in whole if not only or kind in only]
        known = {_UPDATE, *OF_GROUPS, *OF_SLEEPS, *(one[1] for one in kinds)}
        if unknown := set(only) - known:
            raise BadInput("only", f"{sorted(unknown)} are no kinds of faults", limit=", ".join(sorted(known)))
        # of them, those that are to be played before any is played again
        self._next: list[str] = []

    @property
    def has_trainers(self) -> bool:
        return any(kind in self._whole for kind in OF_GROUPS)

    @property
    def owes(self) -> bool:
        """Whether a fault of the whole fleet has not been played yet."""
        return any(not self._notes.played[kind] for kind in self._whole)

    async def play(self, seconds: float) -> None:
        """Draw and play faults for so long; returns when all of them are over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            if not self.weights.calm:
                self._one()
            await asyncio.sleep(min(self._rng.expovariate(1 / _GAP_S), 3 * _GAP_S))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * START_S)
            self._notes.wrong += [f"{task.get_name()} did not end" for task in self._tasks if not task.done()]

    def _one(self) -> None:
        rng = self._rng
        # of the whole fleet one at a time, beside those of instances
        if self._whole and not self.weights.turn.locked() and (not self._kinds or rng.random() < _WHOLE_SHARE):
            self._next = self._next or rng.sample(self._whole, len(self._whole))
            kind = self._next.pop()
            self._begin(kind, None, partial(self._play_whole, kind))
            return
        if not self._kinds:
            return
        _, kind, work = rng.choices(self._kinds, [weight for weight, _, _ in self._kinds])[0]
        order = sorted(self._fleet.nodes)
        rng.shuffle(order)
        for name in order:
            node = self._fleet.nodes[name]
            if node.is_up and len(self._fleet.healthy(node.role)) > 1 and self._fits(kind, node):
                node.faulted = True
                self._begin(kind, node, work)
                return

    @staticmethod
    def _fits(kind: str, node: Node) -> bool:
        if kind == "join or drain":
            return node.role == "decode"
        if "data" in kind:
            # blocks are read from there
            return node.role == "prefill" and node.data is not None
        if "worker" in kind or "rank" in kind:
            workers = len(node.children().get(WORKER, ()))
            return workers > 1 if "rank" in kind else workers == 1
        module = STORE if "store" in kind else TRANSFER if "transfer" in kind else ""
        return not module or module in node.children()

    def _begin(self, kind: str, node: Node | None, work: Callable[..., Awaitable[None]]) -> None:
        """Play a fault; `node`: None: of the whole fleet."""
        where = "" if node is None else node.name
        task = asyncio.get_running_loop().create_task(self._do(kind, node, work), name=f"{kind} {where}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, kind: str, node: Node | None, work: Callable[..., Awaitable[None]]) -> None:
        where = "" if node is None else node.name
        self._notes.begin(kind, where)
        try:
            if node is None:
                async with self.weights.turn:
                    await work(None)
            else:
                await work(node)
        except Exception as error:
            self._notes.wrong.append(f"{kind} of {where or 'the fleet'}: {type(error).__name__}: {error}")
        finally:
            if node is not None:
                node.faulted = False

    # -- the whole fleet ------------------------------------------------------------------------------

    async def _play_whole(self, kind: str, _node: None) -> None:
        if kind == _UPDATE:
            await self.weights.update()
        elif kind in OF_GROUPS:
            await self.trainers.play(kind)
        else:
            await self._sleeps.play(kind)

    # -- processes ------------------------------------------------------------------------------------

    async def _kill(self, node: Node) -> None:
        node.expected = {_KILLED}
        starts = node.starts
        node.kill_now(signal.SIGKILL)
        await self._again(node, starts)

    async def _again(self, node: Node, starts: int) -> None:
        """Wait until the process ended and a new one is ready; `starts`: how often it had been started."""
        await until(lambda: node.starts != starts and node.ready.is_set(), START_S, 0.05)

    async def _stop(self, node: Node, least_s: float, most_s: float) -> None:
        node.kill_now(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(least_s, most_s))
        node.kill_now(signal.SIGCONT)

    async def _stop_child(self, node: Node, module: str, least_s: float, most_s: float) -> None:
        which = self._one_of(node, module)
        if node.signal_child(module, signal.SIGSTOP, which):
            await asyncio.sleep(self._rng.uniform(least_s, most_s))
            node.signal_child(module, signal.SIGCONT, which)

    def _one_of(self, node: Node, module: str) -> int:
        return self._rng.randrange(max(len(node.children().get(module, ())), 1))

    async def _kill_child(self, node: Node, module: str) -> None:
        """Of a child without which the instance fails."""
        node.expected, starts = {_FAILED}, node.starts
        if node.signal_child(module, signal.SIGKILL, self._one_of(node, module)):
            await self._again(node, starts)

    async def _stick_worker(self, node: Node) -> None:
        """Stop a worker until its engine fails: it notices an overdue step, and needs work for that."""
        node.expected, starts = {_FAILED}, node.starts
        which = self._one_of(node, WORKER)
        if node.signal_child(WORKER, signal.SIGSTOP, which):
            with contextlib.suppress(TimeoutError):
                await until(lambda: node.starts != starts or not node.ready.is_set(), 2.5 * STEP_LIMIT_S, 0.05)
            if node.starts == starts and node.ready.is_set():
                # the engine had no work, or only just got some: then it may still end
                node.signal_child(WORKER, signal.SIGCONT, which)
                await asyncio.sleep(2 * STEP_LIMIT_S)
            if node.starts != starts or not node.ready.is_set():
                await self._again(node, starts)
        node.expected = set()

    async def _kill_store(self, node: Node) -> None:
        node.signal_child(STORE, signal.SIGKILL)

    # -- wires of hosts -------------------------------------------------------------------------------

    def _of_wires(self) -> list[_Kind]:
        both = ("ab", "ba")
        return [
            (3, "part short", lambda node: self._part(node, 0.2, 0.9 * LOST_S, both)),
            (3, "part beyond the link", lambda node: self._part(node, 1.1 * LOST_S, 4 * LOST_S, both)),
            (2, "part one way short", lambda node: self._part(node, 0.2, 0.9 * LOST_S)),
            (3, "part one way beyond the link", lambda node: self._part(node, 1.1 * LOST_S, 4 * LOST_S)),
            (1, "part and stop", self._part_and_stop),
            (1, "part router short", lambda _: self._part_router(0.2, 0.9 * LOST_S)),
            (1, "part router beyond the link", lambda _: self._part_router(1.1 * LOST_S, 2 * LOST_S)),
        ]

    async def _part(self, node: Node, least_s: float, most_s: float, directions: tuple[str, ...] = ()) -> None:
        """Cut a host's wire in these directions, or in one that is drawn."""
        assert node.place is not None
        node.place.wire.cut(*(directions or (self._rng.choice(("ab", "ba")),)))
        await asyncio.sleep(self._rng.uniform(least_s, most_s))
        node.place.wire.cut()

    async def _part_and_stop(self, node: Node) -> None:
        """It goes on while nobody hears it yet."""
        assert node.place is not None
        node.place.wire.cut("ab", "ba")
        await self._stop(node, 0.2, LOST_S)
        await asyncio.sleep(self._rng.uniform(0.1, LOST_S))
        node.place.wire.cut()

    async def _part_router(self, least_s: float, most_s: float) -> None:
        """Cut the router off from all instances, which reach each other."""
        assert self._fleet.hosts is not None
        wire = self._fleet.hosts.own.wire
        wire.cut(*self._rng.choice((("ab",), ("ba",), ("ab", "ba"))))
        await asyncio.sleep(self._rng.uniform(least_s, most_s))
        wire.cut()

    # -- links through proxies ------------------------------------------------------------------------

    def _of_proxies(self) -> list[_Kind]:
        return [
            (2, "cut", self._cut),
            (2, "cut one", self._cut_one),
            (2, "refuse", self._refuse),
            (3, "stall short", lambda node: self._stall(node.proxy, 0.2, 0.9 * LOST_S)),
            (1, "stall beyond the link", lambda node: self._stall(node.proxy, 1.1 * LOST_S, 2 * LOST_S)),
            (2, "cut data", self._cut_data),
            (2, "stall data", lambda node: self._stall(node.data, 0.2, 2 * LOST_S)),
        ]

    async def _cut(self, node: Node) -> None:
        node.proxy.cut()

    async def _cut_one(self, node: Node) -> None:
        for _ in range(self._rng.randrange(1, 4)):
            node.proxy.cut_one(self._rng.random())
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))

    async def _refuse(self, node: Node) -> None:
        node.proxy.refuses = True
        node.proxy.cut()
        await asyncio.sleep(self._rng.uniform(0.1, 2 * LOST_S))
        node.proxy.refuses = False

    async def _stall(self, proxy: Proxy | None, least_s: float, most_s: float) -> None:
        """One direction, or both."""
        assert proxy is not None
        proxy.stall(*self._rng.choice(((True, False), (False, True), (True, True))))
        await asyncio.sleep(self._rng.uniform(least_s, most_s))
        if self._rng.random() < 0.3:
            # the bytes that lay still are lost
            proxy.cut()
        proxy.stall(False, False)

    async def _cut_data(self, node: Node) -> None:
        assert node.data is not None
        for _ in range(self._rng.randrange(1, 8)):
            node.data.cut()
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))

    # -- coming and going -----------------------------------------------------------------------------

    async def _join_or_drain(self, _node: Node) -> None:
        fleet = self._fleet
        if not self._spare:
            name = self._spare = f"j{self._joined}"
            self._joined += 1
            guest = fleet.make(name, "decode", workers=0, store=False)
            guest.faulted = True
            await guest.open()
            await asyncio.wait_for(guest.ready.wait(), START_S)
            async with asyncio.timeout(START_S):
                while not await self.weights.added(guest):
                    pass
            guest.faulted = False
            return
        leaver = fleet.nodes.get(self._spare)
        if leaver is None or not leaver.is_up:
            return
        leaver.faulted = True
        self._spare = ""
        try:
            await self._router.drain(leaver.address, _DRAIN_S)
        except (BadInput, PeerUnreachable):
            # a weight update has dropped it, or the router is cut off and has not called it again yet
            self._notes.played["drain: not reached"] += 1
        finally:
            with contextlib.suppress(BadInput):
                # a weight update may have dropped it
                self._router.remove(leaver.address)
            await fleet.drop(leaver)


def slowest_recovery(faults: list[tuple[float, str]], served_at: list[float]) -> tuple[float, str]:
    """The longest time from a fault to the next right answer, and after which fault."""
    worst, after = 0.0, ""
    for at, what in faults:
        later = [time for time in served_at if time > at]
        if later and min(later) - at > worst:
            worst, after = min(later) - at, what
    return worst, after
