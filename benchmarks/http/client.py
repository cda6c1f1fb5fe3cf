"""The arm through the front: raw-socket clients in a process of their own, which count events and parse no JSON.

    python -m benchmarks.http.client PORT LOAD

Opens the streams of a `Load` (JSON) at `/inference/v1/generate` and prints what `_http_load.Tally` counted. Run by
`front.py`; `probes.py` uses its request.
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec
import uvloop

from benchmarks.http.load import Load, Tally
from fdasync.ipc.child import settle

_IDS = b'"token_ids":['
_ROWS = b'"routed_experts":"'
# the longest event that a reader takes, base64 of rows in it
_MOST_EVENT_NBYTES = 64 << 20


def request_of(prompt: list[int], tokens: int) -> bytes:
    """A request for a stream, as sent."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"token_ids": prompt, "stream": True, "sampling_params": sampling}).encode()
    return b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def tokens_of(event: bytes) -> int:
    """Number of new tokens in an event: its commas are counted."""
    at = event.find(_IDS)
    if at < 0:
        return 0
    at += len(_IDS)
    end = event.index(b"]", at)
    return event.count(b",", at, end) + 1 if end > at else 0


async def events(reader: asyncio.StreamReader) -> bytes:
    """The next event, with the bytes of HTTP around it. Raises RuntimeError where the answer is none of events."""
    try:
        return await reader.readuntil(b"\n\n")
    except asyncio.IncompleteReadError as error:
        raise RuntimeError(f"the front answered {error.partial[:500]!r}") from None


async def one(port: int, prompt: list[int], length: int, load: Load, tally: Tally) -> bool:
    """One request; whether it ran to its end. Raises RuntimeError where its answer lacks what was asked for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MOST_EVENT_NBYTES)
    try:
        writer.write(request_of(prompt, length))
        last = 0.0
        has_rows = False
        while b"[DONE]" not in (event := await events(reader)):
            count = tokens_of(event)
            has_rows = has_rows or (load.rows and _ROWS in event)
            if count:
                last = tally.event(count, last)
            if tally.is_over:
                return False
    finally:
        writer.close()
    if load.rows and not has_rows:
        raise RuntimeError("a reply without rows")
    tally.reply()
    return True


async def stream(port: int, number: int, load: Load, tally: Tally) -> None:
    """One request after the other."""
    prompt = load.prompt(number)
    for length in load.lengths(number):
        if not await one(port, prompt, length, load, tally):
            return


async def main(port: int, load: Load) -> None:
    settle()
    tally = Tally(load)
    async with asyncio.TaskGroup() as group:
        for number in range(load.streams):
            group.create_task(stream(port, number, load, tally))
    tally.print()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Load)))
