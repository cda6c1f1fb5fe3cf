"""Work that blocks a loop, paced: however much of it comes, the loop has most of its time for other work.

A compiled grammar cannot be handed from one process to another, so the worker compiles on the loop that launches steps.
Knows no grammars. Called by `grammars.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Paced:
    """One piece of work after another, at most so much of a loop's time.

    Args:
        share: of the loop's time, in the long run.
        burst_s: seconds of work that may come at once, after a time without.
    """

    def __init__(self, share: float, burst_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._turn = asyncio.Lock()
        # loop time at which the work so far was within the share
        self._even_at = -math.inf

    async def run(self, work: Callable[[], T]) -> T:
        """Call it, once it is within the share; what it returns and raises. Cancelling stops the waiting."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            wait_s = self._even_at - loop.time() - self._burst_s / self._share
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            started_at = loop.time()
            # a loop's own clock counts milliseconds
            began = time.perf_counter()
            try:
                return work()
            finally:
                self._even_at = max(self._even_at, started_at) + (time.perf_counter() - began) / self._share
