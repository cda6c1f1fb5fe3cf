"""Blocks from device to device between worker processes: whole, at unequal widths, past a killed sender."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fdasync.cache.host_arena import HostArena
from fdasync.errors import RunnerError, WorkerDied
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.ipc.peers.blocks import BlockPull
from fdasync.runner.base import RunnerLimits
from fdasync.runner.group.workers import WorkerGroup
from fdasync.runner.worker.proxy import WorkerRunner

pytestmark = pytest.mark.usefixtures("forked_children")

SOURCE = b"p" * 16
CONFIG = {"kv_shares": 4, "num_moe_layers": 0}


def make(ranks: int = 1, *, shows: bool = True):
    limits = RunnerLimits(
        max_running=2, max_step_tokens=64, block_tokens=16, num_blocks=8, tensor_parallel=ranks, shows_blocks=shows
    )
    if ranks == 1:
        return WorkerRunner("synthetic", CONFIG, limits, close_deadline_s=120.0)
    return WorkerGroup("synthetic", CONFIG, limits, close_deadline_s=120.0, exchange_deadline_s=300.0)


async def started(runner, fill: int | None = None):
    """A runner with a host tier; its device blocks hold the bytes `fill`, and more."""
    capacity = await runner.open()
    host = HostArena.create(8, capacity.block_nbytes)
    await runner.bind(8, None, host)
    if fill is not None:
        for block in range(8):
            host.kv[block] = [(fill + 31 * block + 7 * at) % 256 for at in range(capacity.block_nbytes)]
        await runner.copy(SwapIn(0, tuple(range(8)), tuple(range(8)), (), ()))
    return host


async def read(runner, host: HostArena, block: int) -> bytes:
    await runner.copy(SwapOut(1, (block,), (7,)))
    return bytes(host.kv[7])


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1), (1, 2)])
def test_blocks_arrive_whole_and_a_killed_sender_is_still_read(theirs, ours):
    async def play() -> None:
        sender, receiver = make(theirs), make(ours)
        hosts = [await started(sender, 5), await started(receiver)]
        peers, own = sender.peer_blocks(), receiver.peer_blocks()
        shown = await peers.export()
        assert len(shown.pools) == len(shown.fds) == theirs
        mine = await own.export()
        await own.open(SOURCE, shown.pools, shown.fds)
        for fd in (*shown.fds, *mine.fds):
            os.close(fd)
        told = await peers.sums([3, 4])
        assert await own.pull(BlockPull(SOURCE, (3, 4), (6, 0))) == told
        for block, place in ((3, 6), (4, 0)):
            assert await read(receiver, hosts[1], place) == bytes(hosts[0].kv[block])
        for pid in sender.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await peers.sums([3])
        # the mapping keeps the memory
        assert await own.pull(BlockPull(SOURCE, (4, 3), (1, 2))) == told[::-1]
        with pytest.raises(RunnerError, match="no block 8"):
            await own.pull(BlockPull(SOURCE, (8,), (1,)))
        await own.close_source(SOURCE)
        with pytest.raises(RunnerError, match="not open"):
            await own.pull(BlockPull(SOURCE, (3,), (1,)))
        await sender.aclose()
        await receiver.aclose()
        for host in hosts:
            host.close()

    asyncio.run(play())


def test_a_runner_that_was_not_asked_shows_nothing():
    async def play() -> None:
        runner = make(shows=False)
        host = await started(runner)
        assert runner.peer_blocks() is None
        await runner.aclose()
        host.close()

    asyncio.run(play())
