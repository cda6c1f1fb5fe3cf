"""Counts Ctrl-C and SIGTERM, and lets a coroutine wait for them: the first one asks, the second one insists.

A terminal that closes (SIGHUP) counts twice, because no user is left to wait for a drain. A SIGHUP that is ignored
(`nohup`) stays ignored. Handlers run on the loop only. Called by `service.py` and `up.py`.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

# how much each counts
_SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 1, signal.SIGHUP: 2}


class Signals:
    """`with Signals() as signals: await signals.wait(count=1, timeout_s=...)`; needs a running loop.

    Attributes:
        count: how many came; a SIGHUP counts as two.
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
        """Wait until so many signals came, one of the others is done, or the time is over; cancels none of them."""
        until = self._loop.time() + timeout_s
        while self.count < count and not any(other.done() for other in others):
            left_s = until - self._loop.time()
            if left_s <= 0:
                return
            # bare deadline: nothing fails by it
            await asyncio.wait([self._changed, *others], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
