"""Measures the CPU of routers in a simulation: what runs in a router's process, without the network that is simulated.

`MeteredLoop` times each callback of a process that a meter watches, in CPU time of the thread. `MeteredWire` takes the
time of the simulated network out. `MeteredRouter` tells the meter what a frame was. Rounds of the garbage collector
count by themselves, since its oldest generation holds all of the simulation. What the metering itself takes is measured
when a meter is made, and taken off. Knows no requests.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextvars import copy_context
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.process import ProcessWire

from fdasync.testing.sim.loop import SimLoop
from fdasync.testing.sim.process import process_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.wire import Frame, Pipe
    from fdasync_fleet.messages import Heartbeat, Message

    from fdasync.testing.sim.process import SimProcess

T = TypeVar("T")

_TRIALS = 100


class Meter:
    """See the module.

    Attributes:
        ns: CPU nanoseconds by what they were spent for.
        watched: processes whose callbacks are metered.
        kind: what the callback that runs has turned out to be for; None before that is known.
    """

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.watched: set[SimProcess] = set()
        self.kind: type | None = None
        self._outside = 0
        self._gc_began = 0
        self._busy = False
        self._run_ns = self._away_ns = 0
        self._away_ns, self._run_ns = self._own_ns()

    def run(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.kind, self._outside, self._busy = None, 0, True
        began = thread_time_ns()
        try:
            callback(*args)
        finally:
            spent = thread_time_ns() - began - self._outside - self._run_ns
            self._busy = False
            kind = _kind_of(callback) if self.kind is None else self.kind.__name__
            self.ns[kind] += max(spent, 0)

    def away(self, work: Callable[..., T], *args: Any) -> T:
        """Do work that is not the router's."""
        if not self._busy:
            return work(*args)
        began = thread_time_ns()
        self._busy = False
        try:
            return work(*args)
        finally:
            self._busy = True
            self._outside += thread_time_ns() - began + self._away_ns

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        """A callback of the collector."""
        if phase == "start":
            self._gc_began = thread_time_ns()
        elif self._busy:
            self._outside += (spent := thread_time_ns() - self._gc_began)
            self.ns[f"gc{info['generation']}"] += spent

    def _own_ns(self) -> tuple[int, int]:
        """What `away` and `run` take by themselves and do not see: the least of some trials."""

        def goes_away() -> None:
            for _ in range(_TRIALS):
                self.away(_nothing)

        away, run = [], []
        for _ in range(_TRIALS):
            self.run(_nothing, ())
            run.append(self.ns["_nothing"])
            self.run(goes_away, ())
            away.append(self.ns["goes_away"])
            self.ns.clear()
        return (min(away) - min(run)) // _TRIALS, min(run)

    def us_each(self, count: int) -> dict[str, float]:
        """CPU microseconds for each of so many requests, by what they were spent for, the most first."""
        return {kind: round(ns / 1000 / count, 2) for kind, ns in self.ns.most_common()}


def _nothing() -> None: ...


def _kind_of(callback: Callable[..., object]) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        # a task that a router started has a number in place of a name
        _, named, name = owner.get_name().rpartition(": ")
        return name if named else str(getattr(owner.get_coro(), "__name__", "task"))
    return str(getattr(callback, "__name__", type(callback).__name__))


class MeteredLoop(SimLoop):
    """See the module."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        super().__init__()

    # the base has overloads
    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self._meter.away(self._metered, super().call_soon, (), callback, args, context)

    # the base has overloads
    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self._meter.away(self._metered, super().call_at, (when,), callback, args, context)

    def _metered(self, call: Any, when: Any, callback: Any, args: Any, context: Any) -> Any:
        context = copy_context() if context is None else context
        if process_of(context) in self._meter.watched:
            callback, args = self._meter.run, (callback, args)
        return call(*when, callback, *args, context=context)

    def metered_gc(self) -> None:
        """Watch the collector until the loop is closed."""
        gc.callbacks.append(self._meter.on_gc)

    def close(self) -> None:
        if self._meter.on_gc in gc.callbacks:
            gc.callbacks.remove(self._meter.on_gc)
        super().close()


class MeteredWire(ProcessWire):
    """See the module."""

    meter: Meter

    def send(self, pipe: Pipe, frames: list[Frame]) -> bool:
        return self.meter.away(super().send, pipe, frames)


class MeteredRouter(Router):
    """See the module."""

    meter: Meter

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        self.meter.kind = type(message)
        super().on_message(peer, message, payload)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        self.meter.kind = type(heartbeat)
        super().on_heartbeat(peer, heartbeat)
