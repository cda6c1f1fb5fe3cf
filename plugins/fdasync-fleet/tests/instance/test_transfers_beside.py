"""Instances whose blocks are copied in a process beside their loop: exact, and failed by name when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

from fdasync import Instance, SamplingParams, connect
from fdasync.errors import ConfigError, EngineFailed, PluginError, WorkerDied
from fdasync.testing import check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.leaks import children, no_leaks

PARAMS = SamplingParams(max_tokens=12, n=2, temperature=0.0)


def make(listen, role, **options):
    config = synthetic_config(role=role, host_blocks=32, leases=LEASES)
    return Instance(config, listen=listen, name=role, links=LINKS, **options)


async def ask(router, config, first):
    prompt = [(first * 37 + at * 5) % 90 + 1 for at in range(45)]
    result = await router.complete(prompt, PARAMS)
    for sample in result.samples:
        check_sample(sample, prompt, PARAMS, oracle_of(config))


@pytest.mark.ci
@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_hand_overs_are_exact_by_one_process_for_each_instance(tmp_path, transport):
    with no_leaks():
        async with AsyncExitStack() as stack:
            sides = [make(f"ipc://{tmp_path}/{role}", role, transport=transport) for role in ("prefill", "decode")]
            for side in sides:
                await stack.enter_async_context(side)
            pids = [side._transports.sources()[0][1].pid for side in sides]
            assert sorted(children()) == sorted(pids)
            router = await stack.enter_async_context(connect([side.address for side in sides], links=LINKS))
            await asyncio.gather(*[ask(router, sides[0].engine.config, number) for number in range(5)])
            assert sides[1].status().stats.scheduler.received_blocks >= 10


async def test_one_that_copies_on_its_loop_starts_none(tmp_path):
    async with make(f"ipc://{tmp_path}/p", "prefill", transfer_process=False) as side:
        assert children() == []
        assert side._transports.sources()[0][1].pid == os.getpid()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_instance_whose_process_dies_fails_by_name(tmp_path, role):
    with no_leaks():
        async with make(f"ipc://{tmp_path}/{role}", role) as side:
            os.kill(side._transports.sources()[0][1].pid, signal.SIGKILL)
            # their end is the engine's
            async with asyncio.timeout(300), side.engine.bus.subscribe() as events:
                async for _ in events:
                    pass
            with pytest.raises(EngineFailed) as caught:
                side.engine.load()
        assert isinstance(caught.value.cause, WorkerDied)
        assert "transfer process" in str(caught.value.cause)


def test_a_transport_that_is_not_there_is_named_before_a_model_is_loaded(tmp_path):
    with pytest.raises(PluginError, match="carrier-pigeon"):
        make(f"ipc://{tmp_path}/p", "prefill", transport="carrier-pigeon")


@pytest.mark.parametrize("in_process", [True, False])
def test_an_address_that_no_transport_can_listen_at_is_named(in_process):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        make("tcp://192.0.2.1:0", "prefill", transfer_process=in_process)
