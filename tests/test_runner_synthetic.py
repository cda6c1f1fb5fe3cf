"""The conformance suite on the synthetic runner: in this process, behind edges, and in a worker."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from fdasync.actions import SwapIn
from fdasync.errors import InvariantBroken
from fdasync.runner.base import CopyOutput, StepOutput, TensorMeta
from fdasync.runner.oracle import SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.worker import WorkerRunner
from fdasync.testing import EdgeRunner, RunnerTests

# set 0 is the default of the config
WEIGHTS = (SyntheticConfig().weights_id, 5)


class TestSynthetic(RunnerTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012
    loads = True

    def make(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)

    def make_of(self, limits, weights):
        return SyntheticRunner(SyntheticConfig(**self.config, weights_id=WEIGHTS[weights]), limits)

    def write_folder(self, folder, weights):
        (folder / "weights.json").write_text(json.dumps({"weights_id": WEIGHTS[weights]}))

    def break_folder(self, folder):
        (folder / "weights.json").write_text("{}")

    def tensors_of(self, weights):
        return [("weights", "uint64", (1,), np.array([WEIGHTS[weights]], np.uint64))]


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

    def copy(self, copy):
        if self.way == "copies move rows":
            self._arena.written_nbytes += 3
            done = asyncio.get_running_loop().create_future()
            super().copy(copy).add_done_callback(
                lambda inner: done.set_result(msgspec.structs.replace(inner.result(), aux_nbytes=3))
            )
            return done
        if self.way == "copies nothing" and self._host is not None:
            done = asyncio.get_running_loop().create_future()
            done.set_result(CopyOutput(copy.copy_id, len(copy.device) * self._host.block_nbytes, 0))
            return done
        if self.way == "mixes blocks up" and isinstance(copy, SwapIn):
            copy = msgspec.structs.replace(copy, device=tuple(sorted(copy.device)))
        if self.way == "first block only":
            moved = len(copy.device) * self._host.block_nbytes
            done = asyncio.get_running_loop().create_future()
            first = {name: getattr(copy, name)[:1] for name in copy.__struct_fields__ if name != "copy_id"}
            short = msgspec.structs.replace(copy, **first)
            super().copy(short).add_done_callback(lambda _: done.set_result(CopyOutput(copy.copy_id, moved, 0)))
            return done
        return super().copy(copy)

    async def end_tensors(self):
        weights_id = self.weights_id
        await super().end_tensors()
        if self.way == "keeps its weights":
            self.weights_id = weights_id

    async def begin_tensors(self, tensors):
        if self.way == "takes any tensor":
            tensors = [TensorMeta("weights", "uint64", (1,))]
        await super().begin_tensors(tensors)

    async def aclose(self):
        if self.way == "aclose leaves futures":
            self._flights.clear()
            self._copies.clear()
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
        ("copies move rows", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("copies nothing", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("copies nothing", "test_a_host_block_is_what_was_written_last"),
        ("copies nothing", "test_copies_in_flight_with_steps_between_them"),
        ("copies nothing", "test_a_copy_that_makes_no_sense_fails"),
        ("mixes blocks up", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("mixes blocks up", "test_many_blocks_in_one_copy"),
        ("first block only", "test_many_blocks_in_one_copy"),
        ("keeps its weights", "test_tensors_change_the_answers_and_back"),
        ("takes any tensor", "test_tensors_that_do_not_fit_change_nothing"),
    ],
)
def test_the_suite_finds_broken_runners(way, test):
    class Suite(TestSynthetic):
        config = {"step_s": 0.2} if way == "aclose leaves futures" else {}

        def make(self, limits):
            runner = _Broken(SyntheticConfig(**self.config), limits)
            runner.way = way
            return runner

        # `make_of` gives sound ones: what the broken one is compared with

    with pytest.raises((AssertionError, InvariantBroken)):
        getattr(Suite(), test)()
