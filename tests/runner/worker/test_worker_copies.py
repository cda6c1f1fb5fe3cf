"""Copies of blocks through a worker: answered in any order, each with its own end, whatever ends the worker."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from fdasync.cache.host_arena import HostArena
from fdasync.errors import RunnerError, WorkerDied
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.runner.base import RunnerLimits
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing.harness.leaks import children
from tests.support.plugins import install_runners

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("forked_children")

LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=8, block_tokens=16)

_PLUGIN = """
    import asyncio, time
    from fdasync.runner.base import CopyOutput
    from fdasync.runner.synthetic import SyntheticRunner

    class Backwards(SyntheticRunner):
        # answers the first copy after the second
        first = None

        def copy(self, copy):
            done = asyncio.get_running_loop().create_future()
            if self.first is None:
                self.first = copy, done
            else:
                done.set_result(CopyOutput(copy.copy_id, 7, 0))
                first, waiting = self.first
                asyncio.get_running_loop().call_soon(waiting.set_result, CopyOutput(first.copy_id, 5, 0))
            return done

    class Clumsy(SyntheticRunner):
        # raises where the contract wants a future that fails
        def copy(self, copy):
            if copy.copy_id == 1:
                raise ValueError("one is odd")
            return super().copy(copy)

    class Loader(SyntheticRunner):
        # takes its time with new weights, and knows whether they are there when it copies
        async def load_folder(self, path):
            await asyncio.sleep(0.02)
            self.loaded = True
            return "x"

        def copy(self, copy):
            assert self.loaded
            return super().copy(copy)

    class Busy(SyntheticRunner):
        def copy(self, copy):
            time.sleep(600)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    names = ("Backwards", "Clumsy", "Loader", "Busy")
    install_runners(tmp_path, monkeypatch, _PLUGIN, {name.lower(): f"fdasync_bad:{name}" for name in names})


@asynccontextmanager
async def bound(runner: str = "synthetic", **config) -> AsyncIterator[WorkerRunner]:
    """A worker with four host blocks; it must be gone at the end, however that comes."""
    worker = WorkerRunner(runner, {"num_moe_layers": 0, **config}, LIMITS, close_deadline_s=300.0)
    host = None
    try:
        async with asyncio.timeout(300):
            capacity = await worker.open()
            host = HostArena.create(4, capacity.block_nbytes)
            await worker.bind(8, None, host)
            yield worker
    finally:
        await worker.aclose()
        if host is not None:
            host.close()
        assert children() == []


async def test_blocks_come_and_go_through_shared_memory():
    async with bound() as worker:
        copies = [worker.copy(SwapOut(number, (number,), (number,))) for number in range(3)]
        assert [output.copy_id for output in await asyncio.gather(*copies)] == [0, 1, 2]
        output = await worker.copy(SwapIn(3, (0, 1, 2), (5, 6, 7)))
        assert (output.copy_id, output.aux_nbytes) == (3, 0)
        assert output.kv_nbytes == 3 * 16 * 8


@pytest.mark.both_loops
async def test_copies_are_answered_in_any_order(plugin):
    async with bound("backwards") as worker:
        ended = []
        copies = [worker.copy(SwapOut(number, (number,), (number,))) for number in range(2)]
        for copy in copies:
            copy.add_done_callback(lambda done: ended.append(done.result().copy_id))
        outputs = await asyncio.gather(*copies)
        assert [output.kv_nbytes for output in outputs] == [5, 7]
        assert ended == [1, 0]


async def test_what_a_copy_raises_is_told_as_its_own_end(plugin):
    async with bound("clumsy") as worker:
        good, bad = [worker.copy(SwapOut(number, (number,), (number,))) for number in range(2)]
        with pytest.raises(RunnerError, match="ValueError: one is odd"):
            await bad
        assert (await good).copy_id == 0


async def test_what_is_sent_behind_a_load_keeps_its_place(plugin):
    async with bound("loader") as worker:
        loading = asyncio.ensure_future(worker.load_folder("any"))
        await asyncio.sleep(0)
        copies = [worker.copy(SwapOut(number, (number,), (number,))) for number in range(2)]
        assert [output.copy_id for output in await asyncio.gather(*copies)] == [0, 1]
        assert await loading == "x"


async def test_a_copy_that_nobody_waits_for_any_more_goes_on():
    async with bound(copy_s=0.01) as worker:
        worker.copy(SwapOut(0, (0,), (0,))).cancel()
        assert (await worker.copy(SwapOut(1, (1,), (1,)))).copy_id == 1


async def test_a_worker_that_dies_fails_its_copies():
    async with bound(copy_s=1000.0) as worker:
        told = []
        worker.on_failure = told.append
        copies = [worker.copy(SwapOut(number, (number,), (number,))) for number in range(3)]
        os.kill(worker.pid, signal.SIGKILL)
        ends = await asyncio.gather(*copies, return_exceptions=True)
        assert [type(end) for end in ends] == [WorkerDied] * 3
        assert [type(error) for error in told] == [WorkerDied]
        with pytest.raises(WorkerDied):
            await worker.copy(SwapOut(3, (3,), (3,)))


async def test_closing_a_worker_that_copies_kills_it_without_asking(plugin):
    async with bound("busy") as worker:
        copy = worker.copy(SwapOut(0, (0,), (0,)))
        # it would not read the question, and the deadline for an answer is later than this
        async with asyncio.timeout(300):
            await worker.aclose()
        with pytest.raises(RunnerError, match="closed"):
            await copy
        with pytest.raises(RunnerError, match="closed"):
            await worker.copy(SwapOut(1, (1,), (1,)))
