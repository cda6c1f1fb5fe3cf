"""Hand-overs from device to device: real workers, real mappings, and senders that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

from fdasync import Instance, SamplingParams, connect
from fdasync.testing import check_sample, oracle_of, synthetic_config

pytestmark = pytest.mark.usefixtures("forked_children")

PARAMS = SamplingParams(max_tokens=12, n=2, temperature=0.0)
RUNNER = {"kv_shares": 4, "pass_stamp": False}


def make(folder, name, role, *, ranks=1, transport="device", **runner):
    config = synthetic_config(
        {**RUNNER, **runner},
        role=role,
        host_blocks=32,
        process="worker",
        tensor_parallel=ranks,
        num_blocks=512,
        leases=LEASES,
    )
    return Instance(config, listen=f"ipc://{folder}/{name}", transport=transport, name=name, links=LINKS)


@asynccontextmanager
async def fleet(*instances):
    async with AsyncExitStack() as stack:
        for instance in instances:
            await stack.enter_async_context(instance)
        yield await stack.enter_async_context(connect([instance.address for instance in instances], links=LINKS))


def swapped(instance):
    planner = instance.engine._runtime.driver.scheduler.swap_planner
    return planner.out_blocks, planner.in_blocks


def lent(instance):
    return instance.engine._runtime.driver.scheduler.index.lent


async def ask(router, oracle, first, length=45):
    prompt = [(first * 37 + at * 5) % 90 + 1 for at in range(length)]
    result = await router.complete(prompt, PARAMS)
    for sample in result.samples:
        check_sample(sample, prompt, PARAMS, oracle)


@pytest.mark.ci
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2)])
async def test_blocks_go_from_device_to_device_at_any_width(tmp_path, senders, receivers):
    p = make(tmp_path, "p", "prefill", ranks=senders)
    d = make(tmp_path, "d", "decode", ranks=receivers)
    async with fleet(p, d) as router:
        assert (p.notice, d.notice) == ("", "")
        await asyncio.gather(*[ask(router, oracle_of(p.engine.config), number, 40 + number) for number in range(6)])
        assert swapped(p) == swapped(d) == (0, 0), "blocks went by way of the host"
        assert d.status().stats.scheduler.received_blocks >= 12
        # the prefix is a hit where it went to
        await ask(router, oracle_of(p.engine.config), 3, 43)
        assert lent(p) == lent(d) == 0


@pytest.mark.ci
@pytest.mark.parametrize("kinds", [("device", "auto"), ("auto", "device")])
async def test_an_instance_that_does_not_take_part_gets_host_blocks(tmp_path, kinds):
    p = make(tmp_path, "p", "prefill", transport=kinds[0])
    d = make(tmp_path, "d", "decode", transport=kinds[1])
    async with fleet(p, d) as router:
        await ask(router, oracle_of(p.engine.config), 1)
        assert swapped(p)[0] > 0
        assert swapped(d)[1] > 0


async def test_runners_that_show_no_blocks_say_so_and_serve(tmp_path):
    # a quarter of a block is no whole number of words
    p = make(tmp_path, "p", "prefill", pass_stamp=True, block_tokens=2)
    d = make(tmp_path, "d", "decode", pass_stamp=True, block_tokens=2)
    async with fleet(p, d) as router:
        assert "device to device" in p.notice
        await ask(router, oracle_of(p.engine.config), 1)
        assert swapped(p)[0] > 0


@pytest.mark.ci
async def test_a_sender_that_is_killed_costs_a_retry_and_its_receiver_goes_on(tmp_path):
    one, other = make(tmp_path, "p0", "prefill", step_s=0.02), make(tmp_path, "p1", "prefill", step_s=0.02)
    d = make(tmp_path, "d", "decode", step_s=0.002)
    await one.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(one.aclose)
        for instance in (other, d):
            await stack.enter_async_context(instance)
        router = await stack.enter_async_context(connect([one.address, other.address, d.address], links=LINKS))
        tasks = [asyncio.ensure_future(ask(router, oracle_of(d.engine.config), number, 100)) for number in range(8)]
        while not d.status().stats.scheduler.received_blocks:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.002)
        for pid in one.engine._runtime.runner.pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert swapped(other)[0] == swapped(d)[1] == 0
        assert lent(other) == lent(d) == 0


@pytest.mark.ci
async def test_a_block_that_is_not_what_was_told_is_copied_again(tmp_path):
    p, d = make(tmp_path, "p", "prefill"), make(tmp_path, "d", "decode")
    async with fleet(p, d) as router:
        devices = p._context.devices
        sums, told = devices.sums, []

        async def wrong(parts):
            found = await sums(parts)
            told.append(len(found))
            return [value ^ (len(told) == 1) for value in found]

        devices.sums = wrong
        await ask(router, oracle_of(p.engine.config), 1)
        assert d.engine.stats().scheduler.leases_dropped == 1
        assert len(told) > 1
        assert swapped(p) == swapped(d) == (0, 0)
        assert lent(p) == lent(d) == 0
