"""The whole proof of a runner: the conformance suite, and its second aux datum through an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from fdasync_example import TinyMoeConfig, TinyMoeRunner

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.testing import RunnerTests

if TYPE_CHECKING:
    from fdasync.runner.base import Runner, RunnerLimits


class TestTinyMoe(RunnerTests):
    logprobs = False  # it computes none

    def make(self, limits: RunnerLimits) -> Runner:
        return TinyMoeRunner(TinyMoeConfig(entropy=True), limits)


PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
SIZES = {"block_tokens": 4, "num_blocks": 12, "host_blocks": 32, "max_context_tokens": 32, "max_running": 4}


async def test_entropy_lives_with_the_blocks():
    config = EngineConfig(runner="tiny_moe", process="inline", tokenizer="none", **SIZES)
    async with Engine(config, runner=TinyMoeRunner(TinyMoeConfig(entropy=True), config.runner_limits())) as engine:
        prompts = [[number, *range(20, 38)] for number in range(4)]
        first = [(await engine.complete(prompt, PARAMS)).aux["entropy"] for prompt in prompts]
        assert {rows.shape for rows in first} == {(19 + 6 - 1, 1)}
        assert len({rows.tobytes() for rows in first}) == 4
        # three other prompts took the device since: this one's blocks come back from the host, with their rows
        again = await engine.complete(prompts[0], PARAMS)
        assert (again.cached.device, again.cached.host) == (0, 16)
        assert np.array_equal(again.aux["entropy"], first[0])
