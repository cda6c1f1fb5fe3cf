"""A router on one of the hosts, and its callers: `python -m tests.system.network._load CONFIG KEYS WEIGHTS ADDRESS...`.

It says `going` after the first right answer, asks on until its standard input ends, then asks until an answer is right
once more, updates the weights where a folder is given, and prints one object: how the requests ended. Started by
`test_instances.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import fdasync
from fdasync import SamplingParams
from fdasync.engine.config import EngineConfig
from fdasync.errors import FdasyncError, TransientError
from fdasync.pd.link.session import LinkConfig
from fdasync.pd.router.config import RouterConfig
from fdasync.testing import check_sample, oracle_of

if TYPE_CHECKING:
    from fdasync.pd.router.router import Router

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)
_EVERY_S = 0.05
_LIMIT_S = 30.0
_QUIET_S = 10.0


def _held(router: Router) -> list[str]:
    """What instances still have of requests, by their latest heartbeats."""
    return [
        f"{one.address}: {count} {name}"
        for one in router.stats().instances
        if one.status is not None
        for name, count in (
            ("waiting", one.status.waiting),
            ("running", one.status.running),
            ("leased", one.status.leased),
            ("blocks in use", one.status.num_blocks - one.status.free_blocks),
        )
        if count
    ]


async def main(config: EngineConfig, keys: str, weights: str, addresses: list[str]) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        loop.remove_reader(0)
        ended.set_result(None)

    # nothing is written to it: it is readable at its end
    loop.add_reader(0, end)
    ends: Counter[str] = Counter()
    oracle = oracle_of(config)
    async with fdasync.connect(addresses, RouterConfig(require="all"), keys=keys, links=LinkConfig()) as router:

        async def ask(number: int) -> bool:
            prompt = [(number * 37 + at * 5) % 90 + 1 for at in range(45 + number % 30)]
            try:
                result = await router.complete(prompt, PARAMS, deadline_s=_LIMIT_S)
            except TransientError as error:
                ends[type(error).__name__] += 1
                return False
            except FdasyncError as error:
                ends[f"wrong: {error}"] += 1
                return False
            (sample,) = result.samples
            check_sample(sample, prompt, PARAMS, oracle)
            ends[sample.finish_reason] += 1
            return sample.finish_reason == "length"

        assert await ask(0)
        print("going", flush=True)
        tasks = []
        while not ended.done():
            tasks.append(asyncio.create_task(ask(len(tasks) + 1)))
            await asyncio.sleep(_EVERY_S)
        async with asyncio.timeout(2 * _LIMIT_S):
            # raises what a check found
            await asyncio.gather(*tasks)
            healed_at = loop.time()
            asked = len(tasks) + 2
            while not await ask(len(tasks)):
                asked += 1
                await asyncio.sleep(_EVERY_S)
            healed_s = loop.time() - healed_at
        if weights:
            await router.update_weights("new", weights)
        # heartbeats say what instances hold
        until = loop.time() + _QUIET_S
        while (held := _held(router)) and loop.time() < until:  # noqa: ASYNC110 - no event tells of heartbeats
            await asyncio.sleep(_EVERY_S)
        told = {
            "ends": dict(ends),
            "asked": asked,
            "healed_s": healed_s,
            "weights": sorted({one.weight_version for one in router.stats().instances}),
            "received_blocks": sum(one.status.totals.received_blocks for one in router.stats().instances if one.status),
            "live": router.stats().live,
            "held": held,
        }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(
        main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig), *sys.argv[2:4], sys.argv[4:])
    )
