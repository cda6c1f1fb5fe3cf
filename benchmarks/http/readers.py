"""The arm without HTTP: readers of a router, in a process of their own.

    python -m benchmarks.http.readers ADDRESS LOAD

Reads the streams of a `Load` (JSON) and prints what `_http_load.Tally` counted. Run by `front.py`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec
import uvloop

from benchmarks.http.load import Load, Tally
from fdasync import SamplingParams, connect
from fdasync.ipc.child import settle

if TYPE_CHECKING:
    from fdasync_fleet.router.router import Router


async def stream(router: Router, number: int, load: Load, tally: Tally) -> None:
    """One request after the other. Raises RuntimeError where a result lacks the rows that were asked for."""
    prompt = load.prompt(number)
    for length in load.lengths(number):
        last = 0.0
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        async with router.generate(prompt, params, routing=load.rows, aux=False) as stream:
            async for delta in stream:
                last = tally.event(len(delta.token_ids), last)
                if tally.is_over:
                    return
            if load.rows and stream.result.samples[0].routing is None:
                raise RuntimeError("a result without rows")
        tally.reply()


async def main(address: str, load: Load) -> None:
    async with connect([address]) as router:
        settle()
        tally = Tally(load)
        async with asyncio.TaskGroup() as group:
            for number in range(load.streams):
                group.create_task(stream(router, number, load, tally))
    tally.print()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Load)))
