"""An engine on one of the hosts, with a Mooncake Store: `python -m tests.system.network._stored MASTER FIRST COUNT`.

It serves so many prompts from number FIRST on, waits until their blocks are written, and prints one object. Started by
`test_mooncake_store.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random

from fdasync import Engine, SamplingParams
from fdasync.testing import check_sample, oracle_of, synthetic_config, until

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
_BLOCKS = 4


async def main(master: str, first: int, count: int) -> None:
    # computing must take longer than reading
    config = synthetic_config({"step_s": 0.5}, host_blocks=64, store="mooncake", store_config={"master": master})
    async with Engine(config) as engine:
        tokens = engine.capacity.block_tokens * _BLOCKS + 1
        for number in range(first, first + count):
            draw = Random(number)
            prompt = [draw.randrange(engine.capacity.vocab_size) for _ in range(tokens)]
            check_sample((await engine.complete(prompt, params=PARAMS)).samples[0], prompt, PARAMS, oracle_of(config))
        stats = engine.stats
        # those of hits are there already
        await until(lambda: stats().scheduler.written_blocks + stats().scheduler.fetched_blocks >= _BLOCKS * count)
        found = stats().scheduler
        print(json.dumps({"written": found.written_blocks, "fetched": found.fetched_blocks, "blocks": _BLOCKS * count}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
