"""Taps that a configuration names: the contract of a tap plugin, and the tasks that run such taps beside an engine.

A tap reads events from a subscription of its own, so it never holds up the engine. This module knows the bus and the
events; it knows no engine and no metric. `engine/runtime.py` makes the taps and runs them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

from fdasync.errors import INTERRUPTS, DeadlineExceeded
from fdasync.events.catalog import TapFailed
from fdasync.stats import MAX_NAME_CHARS, TapStats, cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from fdasync.events.bus import EventBus, Subscription
    from fdasync.events.catalog import Event

    Tasks = set[asyncio.Task[None]]
    Wait = Callable[[Iterable[asyncio.Task[None]], float], Awaitable[tuple[Tasks, Tasks]]]

# a tap that was cancelled has this long to end, in seconds
_CANCEL_S = 1.0


class NoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a tap that has no keys."""


class Tap(ABC):
    """Base class of tap plugins (entry-point group `fdasync.taps`). An engine makes one when it is made itself.

    Attributes:
        config_type: the struct that the tap's keys in `EngineConfig.taps` are decoded into.
        kinds: the classes of the events that the tap reads; empty: all events.
        limit: the subscription holds at most this many events; it drops and counts the events beyond.
        config: the decoded keys.
    """

    config_type: ClassVar[type[msgspec.Struct]] = NoConfig
    kinds: ClassVar[tuple[type[Event], ...]] = ()
    limit: ClassVar[int] = 1024

    def __init__(self, config: msgspec.Struct) -> None:
        self.config = config

    @abstractmethod
    async def run(self, events: Subscription) -> None:
        """Read events until they end. The engine runs this as a task of its loop, from its start to its close.

        It must not block the loop. When it raises, the engine closes the subscription, publishes `TapFailed` and goes
        on. When it has not returned by the engine's close deadline, the engine cancels it, and waits a second more for
        its end.
        """


class TapTasks:
    """The taps of one engine, each a task that reads a subscription.

    Attributes:
        failures: by name, the event of each tap that an error ended or that did not end when it was cancelled; a tap
            that subscribes later gets them first.
    """

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        self.failures: dict[str, TapFailed] = {}
        self._taps = taps
        self._subscriptions: dict[str, Subscription] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}

    def start(self, bus: EventBus) -> None:
        """Subscribe every tap and start its task."""
        for name, tap in self._taps.items():
            events = self._subscriptions[name] = bus.subscribe(*tap.kinds, limit=tap.limit)
            task = asyncio.create_task(self._run(bus, name, tap, events), name=f"fdasync-tap-{name}")
            self._tasks[task] = name

    async def aclose(self, limit_s: float, wait: Wait) -> None:
        """Close the subscriptions and wait for the tasks, which end when they have read what is queued.

        Tasks that have not ended after `limit_s` seconds are cancelled, and have a second more to end. Cancelling
        `aclose` cancels the tasks and does not wait for them. Idempotent.

        Args:
            wait: `ipc.deadlines.wait_within`, which this room may not import: waits so many seconds, and returns the
                tasks that are done and the tasks that are not.

        Raises DeadlineExceeded, naming the taps that did not end by themselves; its notes name those still not ended.
        """
        for events in self._subscriptions.values():
            events.close()
        if not self._tasks:
            return
        try:
            _, late = await wait(self._tasks, limit_s)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        if not late:
            return
        for task in late:
            task.cancel()
        _, stuck = await wait(late, _CANCEL_S)
        error = DeadlineExceeded(f"ending the taps {', '.join(self._names(late))}", limit_s)
        for name in self._names(stuck):
            problem = f"it was cancelled, and did not end within {_CANCEL_S:g} s"
            self.failures[name] = TapFailed(tap=name, problem=problem)
            error.add_note(f"tap {name} goes on: {problem}")
        raise error

    def _names(self, tasks: set[asyncio.Task[None]]) -> list[str]:
        return [name for task, name in self._tasks.items() if task in tasks]

    def stats(self) -> tuple[TapStats, ...]:
        """How each tap does, in the order of the configuration."""
        return tuple(
            [
                TapStats(
                    name=cut(name)[:MAX_NAME_CHARS],
                    delivered=events.delivered,
                    dropped=events.dropped,
                    pending=events.pending,
                    problem="" if name not in self.failures else cut(self.failures[name].problem),
                )
                for name, events in self._subscriptions.items()
            ]
        )

    async def _run(self, bus: EventBus, name: str, tap: Tap, events: Subscription) -> None:
        async with events:
            try:
                await tap.run(events)
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                self.failures[name] = failed = TapFailed(tap=name, problem=f"{type(error).__name__}: {error}")
                events.discard()
                bus.publish(failed)
                if isinstance(error, INTERRUPTS):
                    raise
