"""How long the first token takes, through the front and from a router, asked for at the same moment.

    python -m benchmarks.http.probes ADDRESS PORT PROBES VOCAB_SIZE

Both requests of a pair are sent in one turn of this process's loop, in either order, so that both meet the engine at
the same place of its step. Prints {"front": [seconds, ...], "direct": [...]}. Run by `http.py`, beside other load.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from benchmarks.http.client import events, request_of, tokens_of
from fdasync import SamplingParams, connect
from fdasync.ipc.child import settle

if TYPE_CHECKING:
    from fdasync_fleet.router.router import Router

_PROMPT_TOKENS, _TOKENS = 32, 4
# between two pairs: a random part of a step of 20 ms, and some steps
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.06, 0.08


async def from_front(port: int, prompt: list[int]) -> float:
    """Seconds from sending the request to the first event with a token; the connection is there before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begin = time.monotonic()
        writer.write(request_of(prompt, _TOKENS))
        while not tokens_of(event := await events(reader)):
            pass
        took = time.monotonic() - begin
        while b"[DONE]" not in event:
            event = await events(reader)
    finally:
        writer.close()
    return took


async def from_router(router: Router, prompt: list[int]) -> float:
    """Seconds from the call to the first token."""
    begin = time.monotonic()
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    took = 0.0
    async with router.generate(prompt, params, routing=False, aux=False) as stream:
        async for delta in stream:
            if not took and delta.token_ids:
                took = time.monotonic() - begin
    return took


async def main(address: str, port: int, probes: int, vocab_size: int) -> None:
    rng = np.random.default_rng(9)
    found: dict[str, list[float]] = {"front": [], "direct": []}
    async with connect([address]) as router:
        settle()
        for number in range(probes):
            # other prompts: none finds the other's blocks
            one, other = rng.integers(10, vocab_size, (2, _PROMPT_TOKENS)).tolist()
            works = {"front": from_front(port, one), "direct": from_router(router, other)}
            names = list(works) if number % 2 else list(reversed(works))
            took = await asyncio.gather(*[works[name] for name in names])
            for name, seconds in zip(names, took, strict=True):
                found[name].append(seconds)
            await asyncio.sleep(rng.uniform(_LEAST_PAUSE_S, _MOST_PAUSE_S))
    print(json.dumps(found))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], *[int(word) for word in sys.argv[2:5]]))
