"""What the benchmarks of the HTTP front ask of both arms, and what each arm counts.

The same requests go through the front (`client.py`) and to a router (`readers.py`), each arm in a process
of its own. Knows neither HTTP nor routers. Used by `http.py`.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

#: what an arm prints on a line of its own when it begins to count
COUNTING = "counting"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams, each with one request after the other until the time is over.

    Attributes:
        streams: requests at a time.
        prompt_tokens: of each prompt; a stream repeats its own prompt.
        vocab_size: prompts have token ids below it.
        least_tokens, most_tokens: of each request, new ones: drawn per stream, the same in every arm.
        rows: whether results have expert rows.
        warm_s, count_s: seconds before the count, and of the count.
    """

    streams: int
    prompt_tokens: int
    vocab_size: int
    least_tokens: int
    most_tokens: int
    rows: bool
    warm_s: float
    count_s: float

    def prompt(self, stream: int) -> list[int]:
        found: list[int] = np.random.default_rng((7, stream)).integers(10, self.vocab_size, self.prompt_tokens).tolist()
        return found

    def lengths(self, stream: int) -> Iterator[int]:
        """New tokens of a stream's requests, one after the other, without end."""
        rng = np.random.default_rng((8, stream))
        while True:
            yield int(rng.integers(self.least_tokens, self.most_tokens + 1))


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm counted in its `count_s`.

    Attributes:
        tokens: new ones.
        events: events of HTTP, or deltas of a router.
        replies: requests that ended; with rows, where they were asked for.
        gap_p50_s, gap_p99_s: seconds between two events of one request.
    """

    tokens: int
    events: int
    replies: int
    gap_p50_s: float
    gap_p99_s: float


class Tally:
    """Counts the events of all streams of an arm, within the time that counts; made when the first request is sent.

    Attributes:
        is_over: nothing counts any more.
    """

    def __init__(self, load: Load) -> None:
        self._begin = time.monotonic() + load.warm_s
        self._end = self._begin + load.count_s
        self._tokens = self._events = self._replies = 0
        self._gaps: list[float] = []
        self._told = False

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def event(self, tokens: int, last: float) -> float:
        """An event of so many new tokens has come; `last`: what this returned for the one before, 0: it is the first
        of its request."""
        now = time.monotonic()
        if self._begin <= now < self._end:
            if not self._told:
                self._told = True
                print(COUNTING, flush=True)
            self._events += 1
            self._tokens += tokens
            if last >= self._begin:
                self._gaps.append(now - last)
        return now

    def reply(self) -> None:
        """A request has ended, with all that it asked for."""
        if self._begin <= time.monotonic() < self._end:
            self._replies += 1

    def print(self) -> None:
        """Print what was counted, as JSON."""
        gaps = sorted(self._gaps) or [0.0]
        counted = Counted(
            tokens=self._tokens,
            events=self._events,
            replies=self._replies,
            gap_p50_s=gaps[len(gaps) // 2],
            gap_p99_s=gaps[int(len(gaps) * 0.99)],
        )
        sys.stdout.buffer.write(msgspec.json.encode(counted) + b"\n")
        sys.stdout.flush()
