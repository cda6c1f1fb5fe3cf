"""The two arms of `http.py`, each in a process of its own: streams through the front, and readers of a router.

    python -m benchmarks.http.arms front PORT LOAD
    python -m benchmarks.http.arms router ADDRESS LOAD

Both open the streams of a `Load` (JSON). They print `COUNTING` when they begin to count, and then a `Counted`. The
front's clients are raw sockets that count events and parse no JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import msgspec
import numpy as np
import uvloop

from fdasync import SamplingParams, connect
from fdasync.ipc.child import settle

#: what an arm prints on a line of its own when it begins to count
COUNTING = "counting"
PROMPT_TOKENS = 32
# streams do not end while they are counted
TOKENS = 2000
VOCAB_SIZE = 150_000
# a front that answers nothing ends the benchmark so long after the count
_LATE_S = 120.0
_IDS = b'"token_ids":['


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    streams: requests at a time.
    warm_s, count_s: seconds before the count, and of the count.
    """

    streams: int
    warm_s: float
    count_s: float

    def prompt(self, stream: int) -> list[int]:
        return list(np.random.default_rng((7, stream)).integers(10, VOCAB_SIZE, PROMPT_TOKENS).tolist())


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm counted in its `count_s`.

    Attributes:
        tokens: new ones.
        events: events of HTTP, or deltas of a router.
        gap_p99_s: seconds between two events of one request.
    """

    tokens: int
    events: int
    gap_p99_s: float


class Tally:
    """Counts the events of all streams of an arm, within the time that counts; made when the first request is sent.

    Attributes:
        is_over: nothing counts any more.
    """

    def __init__(self, load: Load) -> None:
        self._begin = time.monotonic() + load.warm_s
        self._end = self._begin + load.count_s
        self._tokens = self._events = 0
        self._gaps: list[float] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def event(self, tokens: int, last: float) -> float:
        """An event of so many new tokens has come; `last`: what this returned for the one before, 0: it is the first
        of its request."""
        now = time.monotonic()
        if self._begin <= now < self._end:
            if not self._events:
                print(COUNTING, flush=True)
            self._events += 1
            self._tokens += tokens
            if last >= self._begin:
                self._gaps.append(now - last)
        return now

    def counted(self) -> Counted:
        gaps = sorted(self._gaps) or [0.0]
        return Counted(tokens=self._tokens, events=self._events, gap_p99_s=gaps[int(len(gaps) * 0.99)])


def tokens_of(event: bytes) -> int:
    """Number of new tokens in an event: its commas are counted."""
    at = event.find(_IDS)
    if at < 0:
        return 0
    at += len(_IDS)
    end = event.index(b"]", at)
    return event.count(b",", at, end) + 1 if end > at else 0


async def through_front(port: str, load: Load, tally: Tally) -> None:
    async def stream(number: int) -> None:
        sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        asked = {"token_ids": load.prompt(number), "stream": True, "sampling_params": sampling}
        body = json.dumps(asked).encode()
        head = b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(head + body)
        last = 0.0
        try:
            while not tally.is_over:
                event = await reader.readuntil(b"\n\n")
                if b"[DONE]" in event:
                    raise RuntimeError("a stream ended while it was counted")
                if count := tokens_of(event):
                    last = tally.event(count, last)
        except asyncio.IncompleteReadError as error:
            raise RuntimeError(f"the front answered {error.partial[:500]!r}") from None
        finally:
            writer.close()

    await asyncio.gather(*[stream(number) for number in range(load.streams)])


async def from_router(address: str, load: Load, tally: Tally) -> None:
    async with connect([address]) as router:

        async def stream(number: int) -> None:
            params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            last = 0.0
            async with router.generate(load.prompt(number), params, routing=False, aux=False) as deltas:
                async for delta in deltas:
                    last = tally.event(len(delta.token_ids), last)
                    if tally.is_over:
                        return
            raise RuntimeError("a stream ended while it was counted")

        await asyncio.gather(*[stream(number) for number in range(load.streams)])


async def main(arm: str, at: str, load: Load) -> None:
    settle()
    tally = Tally(load)
    async with asyncio.timeout(load.warm_s + load.count_s + _LATE_S):
        await {"front": through_front, "router": from_router}[arm](at, load, tally)
    print(msgspec.json.encode(tally.counted()).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Load)))
