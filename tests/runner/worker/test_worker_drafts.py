"""Drafts that cross to a worker: what is verified there, and what is refused there."""

from __future__ import annotations

import pytest

from fdasync.errors import RunnerError
from fdasync.events.actions import Drafts
from fdasync.runner.base import RunnerLimits
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing import on_bench

LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, block_tokens=16, num_blocks=8, pipeline_depth=2, speculation=3)


async def test_drafts_are_verified_in_the_worker_and_bytes_that_do_not_fit_fail_the_step():
    async with on_bench(WorkerRunner("synthetic", {}, LIMITS, close_deadline_s=120.0)) as on:
        prompt = on.prompt(4)
        stream = prompt + (await on.answer(0, prompt, 12, [0])).tokens
        await on.launch_prefill(on.start(1, prompt, [1]))
        tokens = b"".join(token.to_bytes(4, "little") for token in stream[5:12])
        path = Drafts((1,), (5,), (7,), (3,), tokens)
        first, second = on.launch(drafts=path), on.launch(drafts=path)
        assert (await first).tokens == tuple(stream[5:9])
        assert (await second).tokens == tuple(stream[9:13])
        with pytest.raises(RunnerError, match="27 bytes are not the tokens of paths"):
            await on.launch(drafts=Drafts((1,), (13,), (7,), (3,), tokens[:-1]))
