"""The conformance suite on the synthetic runner: in this process, behind edges, and in a worker."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from fdasync.errors import InvariantBroken
from fdasync.runner.base import StepOutput
from fdasync.runner.oracle import SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.worker import WorkerRunner
from fdasync.testing import EdgeRunner, RunnerTests


class TestSynthetic(RunnerTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012

    def make(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)


class TestSyntheticThatTakesTime(TestSynthetic):
    config = {**TestSynthetic.config, "step_s": 0.001, "token_s": 1e-5, "jitter": 1.0}  # noqa: RUF012


class TestDense(TestSynthetic):
    config = {"num_moe_layers": 0}  # noqa: RUF012

    def make(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)


class TestBehindEdges(TestSynthetic):
    def make(self, limits):
        return EdgeRunner(super().make(limits), Random(1), max_delay_s=0.002)


class TestInAWorker(TestSynthetic):
    def make(self, limits):
        return WorkerRunner("synthetic", dict(self.config), limits, close_deadline_s=10.0)


# -- the suite finds broken runners -----------------------------------------------------------------------


class _Broken(SyntheticRunner):
    """Ways to be wrong that a suite must not let pass."""

    way = ""

    def launch(self, step):
        done = super().launch(step)
        if self.way == "out of order" and len(self._flights) == 2:
            done.set_result(StepOutput(step.step_id, (0,)))
        return done

    def _complete(self, flight):
        if self.way == "late rows":
            arena, self._arena = self._arena, None
            super()._complete(flight)
            self._arena = arena
            where = flight.batch.aux_index, flight.batch.generations, flight.rows
            flight.done.get_loop().call_later(0.01, lambda: self._arena and self._arena.scatter(*where))
        else:
            super()._complete(flight)

    def _noise(self, batch, last):
        noise = super()._noise(batch, last)
        if self.way == "noise by batch":
            noise += np.arange(len(noise), dtype=noise.dtype)
        return noise

    def _compute(self, batch):
        if self.way == "generation":
            batch.generations = batch.generations + 1
        if self.way == "slots are blocks":
            batch.aux_index = batch.kv_index
        if self.way == "blind to the cache":
            for lane, start in zip(batch.lanes, batch.starts, strict=True):
                inputs, positions = self.lanes.tokens[lane, :start].astype(np.int64), np.arange(start)
                index = self.lanes.blocks[lane, positions // self._block_tokens].astype(np.int64)
                place = index * self._block_tokens + positions % self._block_tokens
                if start and not self.lanes.length[lane] > self.lanes.known[lane]:
                    self._kv[place] = self.oracle.kv(inputs, positions, self.weights_id)
        return super()._compute(batch)

    async def aclose(self):
        if self.way == "aclose leaves futures":
            self._flights.clear()
        await super().aclose()


@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("late rows", "test_rows_are_there_at_completion_under_their_generation"),
        ("generation", "test_rows_are_there_at_completion_under_their_generation"),
        ("slots are blocks", "test_rows_are_there_at_completion_under_their_generation"),
        ("out of order", "test_steps_overlap_and_complete_in_order"),
        ("noise by batch", "test_noise_is_of_seed_index_and_position_alone"),
        ("blind to the cache", "test_cached_blocks_are_read_not_computed"),
        ("aclose leaves futures", "test_aclose_at_any_time"),
    ],
)
def test_the_suite_finds_broken_runners(way, test):
    class Suite(TestSynthetic):
        config = {"step_s": 0.2} if way == "aclose leaves futures" else {}

        def make(self, limits):
            runner = _Broken(SyntheticConfig(**self.config), limits)
            runner.way = way
            return runner

    with pytest.raises((AssertionError, InvariantBroken)):
        getattr(Suite(), test)()
