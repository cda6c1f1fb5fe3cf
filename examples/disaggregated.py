"""For embedders: prompts over prefill and decode instances, through a router.

    fdasync up --prefill 1 --decode 1 --model CHECKPOINT     # prints the addresses
    python examples/disaggregated.py ipc:///... ipc:///...

Sends a few prompts at a time, one of them again, and shows the answers and the blocks that each instance received.
Without addresses it starts a prefill and a decode instance on the synthetic runner in this process: no model, no torch.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import fdasync
from fdasync import EngineConfig, Instance, Result, Router, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = [list(range(2, 2 + length)) for length in (40, 70, 100)]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, logprobs="raw", seed=7)
RUNNER = {"vocab_size": 128, "block_tokens": 16, "num_blocks": 256, "max_context_tokens": 512}


async def ask(router: Router, prompt: list[int]) -> None:
    async with router.generate(prompt, PARAMS, deadline_s=120) as stream:
        async for delta in stream:
            assert delta.token_ids or delta.finish_reason
    show(prompt, stream.result)


def show(prompt: list[int], result: Result) -> None:
    sample = result.samples[0]
    assert sample.raw_logprobs is not None
    rows = "no routing" if sample.routing is None else f"routing {sample.routing.array.shape}"
    print(
        f"prompt of {len(prompt)}: {len(sample.token_ids)} tokens ({sample.finish_reason}),"
        f" mean logprob {sample.raw_logprobs.mean():.2f}, {rows}, {sample.cached_tokens} cached"
    )


async def main(addresses: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        if not addresses:
            addresses = await start_own(stack)
        router = await stack.enter_async_context(fdasync.connect(addresses))
        async with asyncio.TaskGroup() as group:
            for prompt in PROMPTS:
                group.create_task(ask(router, prompt))
        # blocks that both instances have are neither computed nor sent again
        await ask(router, PROMPTS[-1])
        # instances send their status twice a second
        await asyncio.sleep(1.2)
        for one in router.stats().instances:
            assert one.stats is not None
            told = one.stats.scheduler
            print(f"{one.role} {one.name}: {told.finished} samples, {told.received_blocks} blocks received")


async def start_own(stack: AsyncExitStack) -> list[str]:
    """A prefill and a decode instance; yours would be processes of their own, as `fdasync up` starts them."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    addresses = []
    for role in ("prefill", "decode"):
        config = EngineConfig(runner="synthetic", runner_config=RUNNER, process="inline", role=role, host_blocks=256)
        instance = Instance(config, listen=f"ipc://{folder}/{role}", name=role)
        addresses.append((await stack.enter_async_context(instance)).address)
    return addresses


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
