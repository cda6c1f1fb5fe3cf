"""Routers of real instances that stand still with their process, or die with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import uvloop

import fdasync
from fdasync import SamplingParams
from fdasync.testing import check_sample, oracle_of, until
from tests.support.commands import command, config_file, config_of

if TYPE_CHECKING:
    from pathlib import Path

# longer than an instance may be silent
_STEP_S = 4.0
_ASKS = """
import asyncio, sys
import fdasync
from fdasync import SamplingParams


async def main():
    async with fdasync.connect([sys.argv[1]]) as router:
        async with router.generate([1, 2, 3], SamplingParams(max_tokens=200)) as stream:
            async for delta in stream:
                print("began", flush=True)


asyncio.run(main())
"""


@pytest.mark.ci
def test_a_trainers_step_in_the_routers_process_costs_no_stream(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 0.03, "num_blocks": 256})
    addresses = {role: f"ipc://{tmp_path}/{role}" for role in ("prefill", "decode")}
    params = SamplingParams(max_tokens=200, temperature=0.0)
    oracle = oracle_of(config_of(config))

    async def ask() -> None:
        async with fdasync.connect(list(addresses.values())) as router:

            async def read(first: int) -> None:
                prompt = [first, 2, 3, 4, 5]
                tokens: list[int] = []
                async with router.generate(prompt, params) as stream:
                    async for delta in stream:
                        tokens += delta.token_ids
                check_sample(stream.result.samples[0], prompt, params, oracle)
                assert tuple(tokens) == tuple(stream.result.samples[0].token_ids)

            reading = [asyncio.ensure_future(read(first)) for first in range(3)]
            whole = asyncio.ensure_future(router.complete([9, 2, 3, 4, 5], params))
            await asyncio.sleep(1.0)
            assert not any(task.done() for task in reading)
            began = time.monotonic()
            while time.monotonic() - began < _STEP_S:
                pass  # the trainer's step: this loop stands still
            await asyncio.gather(*reading)
            check_sample((await whole).samples[0], [9, 2, 3, 4, 5], params, oracle)

    with ExitStack() as running:
        for role, address in addresses.items():
            folder = tmp_path / f"of-{role}"
            folder.mkdir()
            options = ["--config", str(config), "--role", role, "--listen", address]
            running.enter_context(command(folder, "serve", *options)).until("ready at")
        uvloop.run(ask())


@pytest.mark.ci
def test_requests_of_a_router_that_was_killed_end_at_once(tmp_path: Path) -> None:
    config = config_file(tmp_path, {"step_s": 2.0})
    address = f"ipc://{tmp_path}/m0"

    async def watch(asks: subprocess.Popen[bytes]) -> None:
        async with fdasync.connect([address]) as router:

            def running() -> int:
                status = router.stats().instances[0].status
                return -1 if status is None else status.stats.scheduler.running

            await until(lambda: running() == 1)
            asks.kill()
            # 200 steps would take 400 s
            await until(lambda: running() == 0, 120)

    with command(tmp_path, "serve", "--config", str(config), "--listen", address) as serves:
        serves.until("ready at")
        with subprocess.Popen([sys.executable, "-c", _ASKS, address], stdout=subprocess.PIPE) as asks:
            assert asks.stdout is not None
            assert asks.stdout.readline() == b"began\n"
            uvloop.run(watch(asks))
