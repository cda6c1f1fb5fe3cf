"""The staging area of a transport: the only memory that Mooncake may reach, and who uses which slot of it.

Everybody who reaches Mooncake's ports can read and write registered memory, whoever they are. So none of an instance's
regions is ever registered. What is sent is copied into a slot first, and what came is copied out of a slot, and checked
after that copy. The area has one size for ever, whatever peers ask for. Knows no engine and no peer. Used by
`transport.py` and `server.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

#: bytes of a slot, and so of one transfer
SLOT_NBYTES = 1 << 20
#: slots for what comes, and as many behind them for what goes
SLOTS = 32
STAGING_NBYTES = 2 * SLOTS * SLOT_NBYTES


class Slots:
    """Shares numbered places: a user may take one more only while at least as many are free as it holds.

    So one more user always finds a place, however many users are stuck with theirs. Who waits is served in turn.
    """

    def __init__(self, numbers: range) -> None:
        self._free = deque(numbers)
        self._held: Counter[Hashable] = Counter()
        self._waiting: deque[tuple[Hashable, asyncio.Future[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def take(self, user: Hashable) -> int:
        """A place, once there is one for this user; its caller bounds the wait, by cancelling it."""
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((user, waiter))
        self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(user, waiter.result())  # of a future that is done
            raise

    def give(self, user: Hashable, number: int) -> None:
        """Give a place back."""
        self._held[user] -= 1
        if not self._held[user]:
            del self._held[user]
        self._free.append(number)
        self._serve()

    def _serve(self) -> None:
        passed_over: deque[tuple[Hashable, asyncio.Future[int]]] = deque()
        while self._waiting and self._free:
            user, waiter = self._waiting.popleft()
            if waiter.done():
                continue
            if self._held[user] > len(self._free):
                passed_over.append((user, waiter))
                continue
            self._held[user] += 1
            waiter.set_result(self._free.popleft())
        self._waiting.extendleft(reversed(passed_over))
