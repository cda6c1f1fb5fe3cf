"""For `test_two_machines.py`: a fleet over two machines, from the first of them. The test answers each of its lines.

python two_machines.py RAY_ADDRESS KEYS_FILE
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import ray
from fdasync_fleet.link.keys import new_keys
from fdasync_fleet.router.config import RouterConfig
from fdasync_ray import FleetConfig, RayFleet, attach

from fdasync import EngineConfig, SamplingParams, connect
from fdasync.errors import ConfigError, FdasyncError

PARAMS = SamplingParams(max_tokens=24, seed=7)
FILLER_NBYTES = 24 << 20
PROMPT = list(range(2, 60))
RUNNER = {"vocab_size": 128, "block_tokens": 16, "num_blocks": 256, "max_context_tokens": 512, "step_s": 0.005}


LINES: list[str] = []


def tell(line: str) -> None:
    LINES.append(line)
    print(line, file=sys.stderr)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)
    assert sys.stdin.readline(), "the test has ended"


async def refusal(addresses: list[str], keys: Any) -> str:
    try:
        async with connect(addresses, RouterConfig(connect_s=3), keys=keys):
            return ""
    except (ConfigError, FdasyncError) as error:
        return type(error).__name__


async def load(router: Any, going: asyncio.Event, number: int) -> int:
    done = 0
    while going.is_set():
        result = await router.complete([number + 2, *PROMPT], PARAMS, deadline_s=60)
        assert result.samples[0].finish_reason == "length", result
        assert len(result.samples[0].token_ids) == PARAMS.max_tokens
        done += 1
    return done


class Trainer:
    """An actor whose process ends soon after its update, and its objects with it."""

    async def update(self, number: int) -> None:
        client = attach("fleet")
        async with client.router() as router:
            await client.update_weights(router, number, weights(number))


def weights(number: int) -> list[Any]:
    """The runner reads the first tensor, the rest takes room."""
    filler = np.zeros(FILLER_NBYTES, np.uint8)
    return [("weights", "uint64", (1,), np.array([number], np.uint64)), ("filler", "uint8", filler.shape, filler)]


async def tokens_of(router: Any, address: str) -> list[int]:
    return list((await router.complete(PROMPT, PARAMS, decoders=[address])).samples[0].token_ids)


async def weights_cross(engine: EngineConfig) -> None:
    """Who joins after a trainer has died gets its weights from another machine; each machine reads an object once."""
    async with RayFleet(FleetConfig(engine=engine, mixed=1), tell) as fleet, fleet.router() as router:
        (first,) = await fleet.members()
        before = await tokens_of(router, first.address)
        trainer = ray.remote(Trainer).options(num_cpus=0).remote()
        await trainer.update.remote(7)
        ray.kill(trainer)
        await fleet.scale(mixed=2)
        (second,) = [one for one in await fleet.members() if one != first]
        async with fleet.router() as router_of_both:
            told = [await tokens_of(router_of_both, one.address) for one in (first, second)]
        say(
            what="outlived",
            nodes=[first.node, second.node],
            changed=told[0] != before,
            same=told[0] == told[1],
            lines=LINES,
        )
        await fleet.scale(mixed=4)
        say(what="publishing", nodes=sorted(Counter(one.node for one in await fleet.members()).values()))
        path = await fleet.publish(weights(8))
        say(what="published", nbytes=FILLER_NBYTES, path=path)


async def main(address: str, keys_file: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    engine = EngineConfig(
        runner="synthetic", runner_config=RUNNER, process="inline", role="mixed", host_blocks=64, close_deadline_s=5
    )
    await weights_cross(engine)
    # tcp: the two "machines" have one kernel, which would let them share memory
    config = FleetConfig(engine=engine, prefill=1, decode=2, keys=keys_file, transport="tcp")
    async with RayFleet(config, tell) as fleet, fleet.router() as router:
        members = await fleet.members()
        addresses = [one.address for one in members]
        before = await router.complete(PROMPT, PARAMS)
        # hand-overs from machine to machine
        crossed = 0
        for one in members:
            if one.role == "decode":
                result = await router.complete([9, *PROMPT], PARAMS, decoders=[one.address])
                crossed += result.samples[0].finish_reason == "length"
        async with connect(addresses, keys=keys_file) as other:
            again = await other.complete(PROMPT, PARAMS)
        await fleet.update_weights(router, 5, weights(77))
        told = await router.complete(PROMPT, PARAMS)
        each = [await tokens_of(router, one.address) for one in members if one.role == "decode"]
        say(
            what="serves",
            members=[[one.name, one.address, one.pid, one.node] for one in members],
            without_keys=await refusal(addresses, None),
            with_other_keys=await refusal(addresses, new_keys()),
            same=list(again.samples[0].token_ids) == list(before.samples[0].token_ids),
            crossed=crossed,
            updated=all(one == list(told.samples[0].token_ids) for one in each),
            changed=list(told.samples[0].token_ids) != list(before.samples[0].token_ids),
        )
        going = asyncio.Event()
        going.set()
        tracks = [asyncio.create_task(load(router, going, number)) for number in range(4)]
        await asyncio.sleep(0.5)
        own = {one.address.rpartition(":")[0] for one in members if "10.77.0.1" in one.address}
        say(what="loaded")
        # the test has cut the wire
        began = time.monotonic()
        now = await fleet.until(
            lambda view: (
                view.members
                if len(view.members) == 3 and {one.address.rpartition(":")[0] for one in view.members} == own
                else None
            ),
            "the fleet to be whole",
            60,
        )
        whole_s = time.monotonic() - began
        going.clear()
        done = await asyncio.gather(*tracks)
        say(what="whole", whole_s=whole_s, done=done, members=[[one.name, one.address] for one in now])
    with contextlib.suppress(Exception):
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
