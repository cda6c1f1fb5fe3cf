"""The event bus: stamps events and queues them for the next turn of the driver.

`publish` returns nothing, is not awaited, and cannot block or raise (docs/design.md, section 2). Taps (metrics, traces,
plugins) read from bounded queues and can never hold up the engine. Each engine has one bus; it knows no scheduler and
no actions. The engine's services publish to it; the driver attaches itself and drains it. Earlier events wait for it.
A bus without an engine hands its events to its taps itself (`feed_itself`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import force_setattr

from fdasync.errors import BadInput
from fdasync.events.catalog import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

E = TypeVar("E", bound=Event)


def check_subscription(kinds: object, limit: object) -> None:
    """Refuse a wrong kind or limit here, before it could harm a turn of the engine. Raises BadInput."""
    if not isinstance(kinds, tuple) or not all(isinstance(kind, type) and issubclass(kind, Event) for kind in kinds):
        raise BadInput("kinds", f"{kinds!r:.200} is no tuple of classes of events")
    if type(limit) is not int or limit < 1:
        raise BadInput("limit", f"is {limit!r:.100}", limit="an int of 1 or more")


class Subscription:
    """One tap: an async iterator of events behind a bounded queue; events that do not fit are dropped and counted.

    Attributes:
        delivered: events handed out.
        dropped: events lost because the tap was slow.
    """

    def __init__(self, bus: EventBus, kinds: tuple[type[Event], ...], limit: int) -> None:
        self.delivered = 0
        self.dropped = 0
        self._bus = bus
        self._kinds = kinds
        self._limit = limit
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def pending(self) -> int:
        """Events queued and not yet taken."""
        return len(self._events)

    def offer(self, events: Iterable[Event]) -> None:
        """Queue the events of one turn; called by the bus."""
        for event in events:
            if self._kinds and not isinstance(event, self._kinds):
                continue
            if len(self._events) >= self._limit:
                self.dropped += 1
            else:
                self._events.append(event)
        self._wake()

    def discard(self) -> None:
        """Drop and count the events that wait."""
        self.dropped += len(self._events)
        self._events.clear()

    def close(self) -> None:
        """End the iteration once the queue is empty; idempotent."""
        self._closed = True
        self._bus.unsubscribe(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and (self._events or self._closed):
            self._waiter.set_result(None)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("a tap has one reader at a time")
            self._waiter = asyncio.get_running_loop().create_future()
            # a tap may wait as long as the engine lives: its close is the deadline
            await self._waiter
        self.delivered += 1
        return self._events.popleft()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class EventBus:
    """Queue of published events.

    Args:
        clock: engine time in seconds; without an engine, seconds since any fixed moment.
        standing: returns the published events that still hold; a new tap gets them first.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, standing: Callable[[], Iterable[Event]] = tuple
    ) -> None:
        self._clock = clock
        self._standing = standing
        self._wake: Callable[[], None] | None = None
        self._queue: list[Event] = []
        self._taps: list[Subscription] = []
        self._closed = False
        self._seq = 0

    def publish(self, event: Event) -> None:
        """Stamp the event with sequence number and engine time, and queue it. Cannot block or raise."""
        # the one place that writes to a frozen event, before it is read anywhere
        force_setattr(event, "seq", self._seq)
        force_setattr(event, "at", self._clock())
        self._seq += 1
        if not self._queue and self._wake is not None:
            # first, so that an event that is queued is never without a turn, wherever an interrupt comes
            self._wake()
        self._queue.append(event)

    def attach(self, wake: Callable[[], None]) -> None:
        """Register the one reader that drains the queue.

        Args:
            wake: called when the queue goes from empty to not empty, and now if events wait already; schedules a turn.
        """
        self._wake = wake
        if self._queue:
            wake()

    def feed_itself(self) -> None:
        """Where no engine drains the queue: hand events to the taps in the next turn of the running loop, from now on.

        Events are then published on this loop. Raises RuntimeError where no loop runs.
        """
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon(lambda: self.feed_taps(self.drain()))

        self.attach(wake)

    def drain(self) -> list[Event]:
        """All queued events, oldest first; events published from now on belong to the next turn."""
        events, self._queue = self._queue, []
        return events

    def feed_taps(self, events: list[Event]) -> None:
        """Hand the events of a finished turn to the taps."""
        for tap in self._taps:
            tap.offer(events)

    def subscribe(self, *kinds: type[Event], limit: int = 1024) -> Subscription:
        """A tap on events of these kinds (all kinds when none is named), holding at most `limit`. Raises BadInput."""
        check_subscription(kinds, limit)
        tap = Subscription(self, kinds, limit)
        if self._closed:
            tap.close()
        else:
            tap.offer(event for event in self._standing() if event not in self._queue)
            self._taps.append(tap)
        return tap

    def unsubscribe(self, tap: Subscription) -> None:
        if tap in self._taps:
            self._taps.remove(tap)

    def close(self) -> None:
        """End every tap; later ones end at once."""
        self._closed = True
        for tap in list(self._taps):
            tap.close()
