"""A router on one of the hosts, and its callers: `_load CONFIG KEYS WEIGHTS LATE ADDRESS...`, run with `python -m`.

It says `going` after the first right answer, and asks on until its standard input ends. A line on it has the weights
updated from that folder while requests go on, and `updated` said. At the end it asks until an answer is right once
more, and prints one object: how the requests ended. Every other request is read as a stream. With LATE 1 one more
request runs longer than its deadline. Started by `fleets.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.config import RouterConfig

import fdasync
from fdasync import SamplingParams
from fdasync.engine.config import EngineConfig
from fdasync.errors import FdasyncError, TransientError
from fdasync.request import FIRST_VERSION
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import check_sample, oracle_of

if TYPE_CHECKING:
    from fdasync_fleet.router.router import Router

    from fdasync.result import Result

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)
NEW_VERSION = "new"
LATE_PARAMS, LATE_S = SamplingParams(max_tokens=200), 0.4
_EVERY_S = 0.05
_LIMIT_S = 30.0
_QUIET_S = 10.0


def _held(router: Router) -> list[str]:
    """What instances still have of requests, by their latest heartbeats; those without a link are named."""
    away = [f"{one.address}: {one.problem}" for one in router.stats().instances if one.status is None or not one.is_up]
    return away + [
        f"{one.address}: {count} {name}"
        for one in router.stats().instances
        if one.status is not None
        for name, count in (
            ("waiting", one.status.stats.scheduler.waiting),
            ("running", one.status.stats.scheduler.running),
            ("leased", one.status.stats.scheduler.leased),
            ("blocks in use", one.status.stats.scheduler.num_blocks - one.status.free_blocks),
        )
        if count
    ]


async def main(config: EngineConfig, keys: str, weights: str, late: str, addresses: list[str]) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    updates: list[asyncio.Task[None]] = []
    times: list[float] = []
    ends: Counter[str] = Counter()
    # the label of weights: what they compute
    oracles = {FIRST_VERSION: oracle_of(config)}
    if weights:
        own = msgspec.json.decode((Path(weights) / WEIGHTS_FILE).read_bytes())
        oracles[NEW_VERSION] = oracle_of(msgspec.structs.replace(config, runner_config={**config.runner_config, **own}))
    async with fdasync.connect(addresses, RouterConfig(require="all"), keys=keys, links=LinkConfig()) as router:

        async def update() -> None:
            await router.update_weights(NEW_VERSION, weights)
            print("updated", flush=True)

        async def rejoin() -> None:
            while router.stats().missing:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(_EVERY_S)

        def command() -> None:
            if sys.stdin.buffer.raw.read(100):  # type: ignore[attr-defined]
                updates.append(loop.create_task(update()))
                return
            loop.remove_reader(0)
            ended.set_result(None)

        loop.add_reader(0, command)

        async def answer(prompt: list[int], *, streams: bool) -> Result:
            if not streams:
                return await router.complete(prompt, PARAMS, deadline_s=_LIMIT_S)
            tokens: list[int] = []
            async with router.generate(prompt, PARAMS, deadline_s=_LIMIT_S) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
                assert stream.result is not None
                assert tuple(tokens) == stream.result.samples[0].token_ids, "the deltas are not the result"
                return stream.result

        async def ask(number: int) -> bool:
            prompt = [(number * 37 + at * 5) % 90 + 1 for at in range(45 + number % 30)]
            try:
                result = await answer(prompt, streams=number % 2 > 0)
            except TransientError as error:
                ends[type(error).__name__] += 1
                return False
            except FdasyncError as error:
                ends[f"wrong: {error}"] += 1
                return False
            (sample,) = result.samples
            versions = [span.version for span in sample.weight_version]
            assert len(versions) < 2, versions
            names = () if sample.routing is None and sample.finish_reason != "length" else None
            check_sample(sample, prompt, PARAMS, oracles[versions[0] if versions else FIRST_VERSION], names=names)
            ends[sample.finish_reason] += 1
            return sample.finish_reason == "length"

        assert await ask(0)
        print("going", flush=True)
        tasks = []
        while not ended.done():
            tasks.append(asyncio.create_task(ask(len(tasks) + 1)))
            await asyncio.sleep(_EVERY_S)
        joined = loop.create_task(rejoin())
        came_up = loop.time()
        joined.add_done_callback(lambda _: times.append(loop.time() - came_up))
        async with asyncio.timeout(2 * _LIMIT_S):
            # raises what a check found
            await asyncio.gather(*tasks, *updates)
            healed_at = loop.time()
            asked = len(tasks) + 2
            while not await ask(len(tasks)):
                asked += 1
                await asyncio.sleep(_EVERY_S)
            healed_s = loop.time() - healed_at
        overdue: dict[str, Any] = {}
        if int(late):
            began = loop.time()
            result = await router.complete([1] * 45, LATE_PARAMS, deadline_s=LATE_S)
            overdue = {"end": result.samples[0].finish_reason, "took_s": loop.time() - began}
        # heartbeats say what instances hold
        until = loop.time() + _QUIET_S
        while (held := _held(router)) and loop.time() < until:  # noqa: ASYNC110 - no event tells of heartbeats
            await asyncio.sleep(_EVERY_S)
        joined.cancel()
        told = {
            "ends": dict(ends),
            "asked": asked,
            "healed_s": healed_s,
            "joined_s": times[0] if times else None,
            "late": overdue,
            "weights": sorted({one.weight_version for one in router.stats().instances}),
            "received_blocks": sum(
                one.status.stats.scheduler.received_blocks for one in router.stats().instances if one.status
            ),
            "live": router.stats().live,
            "held": held,
        }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(
        main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig), *sys.argv[2:5], sys.argv[5:])
    )
