"""Ctrl-C and SIGTERM as something to wait for, counted: the first one asks, the second one insists.

No handler runs code of ours anywhere but on the loop. Used by `serve`, `up` and `demo`.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """`with Signals() as signals: await signals.reach(1, timeout_s)`; needs a running loop.

    Attributes:
        count: so many came.
    """

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Signals:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._came)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)
        self._changed.cancel()

    def _came(self) -> None:
        self.count += 1
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    async def wait(self, *others: asyncio.Future[Any], count: int, timeout_s: float) -> None:
        """Until so many signals came, one of the others is done, or the time is over; cancels none of them."""
        until = self._loop.time() + timeout_s
        while self.count < count and not any(other.done() for other in others):
            left_s = until - self._loop.time()
            if left_s <= 0:
                return
            await asyncio.wait([self._changed, *others], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
