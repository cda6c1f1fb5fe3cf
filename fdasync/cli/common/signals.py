"""Ctrl-C and SIGTERM as something to wait for, counted: the first one asks, the second one insists.

A terminal that closes (SIGHUP) insists at once: nobody is there to wait for a drain, or to be told of it; where it is
ignored (`nohup`) it stays so. No handler runs code of ours anywhere but on the loop. Used by `serve` and `up`.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

# and what each counts
_SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 1, signal.SIGHUP: 2}


class Signals:
    """`with Signals() as signals: await signals.reach(1, timeout_s)`; needs a running loop.

    Attributes:
        count: so many came; a SIGHUP is two.
    """

    def __init__(self) -> None:
        self.count = 0
        self._handled: list[signal.Signals] = []
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Signals:
        for number, counts in _SIGNALS.items():
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._loop.add_signal_handler(number, self._came, counts)
            self._handled.append(number)
        return self

    def __exit__(self, *exc: object) -> None:
        while self._handled:
            self._loop.remove_signal_handler(self._handled.pop())
        self._changed.cancel()

    def _came(self, counts: int) -> None:
        self.count += counts
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    async def wait(self, *others: asyncio.Future[Any], count: int, timeout_s: float) -> None:
        """Until so many signals came, one of the others is done, or the time is over; cancels none of them."""
        until = self._loop.time() + timeout_s
        while self.count < count and not any(other.done() for other in others):
            left_s = until - self._loop.time()
            if left_s <= 0:
                return
            # bare deadline: nobody is called late by it
            await asyncio.wait([self._changed, *others], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
