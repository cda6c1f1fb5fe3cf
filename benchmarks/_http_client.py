"""Raw-socket clients of the HTTP front, in a process of their own: they count events and parse no JSON.

    python -m benchmarks._http_client PORT STREAMS TOKENS WARM_S COUNT_S

Opens so many streams of `/inference/v1/generate`, lets them run for `WARM_S`, then counts for `COUNT_S`. Prints one
JSON object: events, bytes, and the gaps between two reads of a stream. Run by `http.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

_EVENT = b"data: "


async def stream(port: int, number: int, tokens: int, state: dict[str, float], gaps: list[float]) -> None:
    body = json.dumps(
        {
            "token_ids": [number + 1] * 32,
            "stream": True,
            "sampling_params": {"max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    last = 0.0
    while data := await reader.read(1 << 16):
        now = time.monotonic()
        if state["from"] <= now < state["until"]:
            state["events"] += data.count(_EVENT)
            state["nbytes"] += len(data)
            if last >= state["from"]:
                gaps.append(now - last)
        last = now
        if now >= state["until"] or b"[DONE]" in data:
            break
    writer.close()


async def main(port: int, streams: int, tokens: int, warm_s: float, count_s: float) -> None:
    begin = time.monotonic() + warm_s
    state = {"from": begin, "until": begin + count_s, "events": 0, "nbytes": 0}
    gaps: list[float] = []
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(stream(port, number, tokens, state, gaps))
    gaps.sort()
    print(
        json.dumps(
            {
                "events": state["events"],
                "nbytes": state["nbytes"],
                "gap_p50_s": gaps[len(gaps) // 2] if gaps else 0.0,
                "gap_p99_s": gaps[int(len(gaps) * 0.99)] if gaps else 0.0,
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main(*[int(word) for word in sys.argv[1:4]], *[float(word) for word in sys.argv[4:6]]))
