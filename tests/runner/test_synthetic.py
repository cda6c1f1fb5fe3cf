"""The conformance suite on the synthetic runner: in this process, behind edges, and in a worker."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from fdasync import SamplingParams
from fdasync.errors import BadInput, InvariantBroken
from fdasync.events.actions import SwapIn
from fdasync.request import Grammar
from fdasync.runner.base import CopyOutput, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import U64, Oracle, SyntheticConfig
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing import DraftTests, FaultRunner, RunnerTests, RunTests, check_sample, oracle_of, synthetic_engine

# set 0 is the default of the config
WEIGHTS = (SyntheticConfig().weights_id, 5)


class TestSynthetic(RunnerTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012
    loads = True
    grammar = Grammar("regex", "%7")

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


@pytest.mark.ci
class TestSyntheticThatChooses(TestSynthetic):
    config = {**TestSynthetic.config, "chosen_top_k": 5}  # noqa: RUF012


class TestSyntheticRuns(RunTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012

    def make(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config, max_run_tokens=4), limits)

    def make_plain(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)


@pytest.mark.heavy("the suite of runners that draft")
class TestSyntheticDrafts(DraftTests):
    config: dict[str, Any] = {"pass_stamp": True, "values_spec": True}  # noqa: RUF012

    def make(self, limits):
        return SyntheticRunner(SyntheticConfig(**self.config), limits)


class TestSyntheticRunsThatTakeTime(TestSyntheticRuns):
    config = {**TestSyntheticRuns.config, "token_s": 1e-5, "jitter": 1.0}  # noqa: RUF012


class TestSyntheticThatTakesTime(TestSynthetic):
    config = {**TestSynthetic.config, "step_s": 0.001, "token_s": 1e-5, "jitter": 1.0}  # noqa: RUF012


class Overtaken(SyntheticRunner):
    """The timer of every other step comes late, after the next one's: its loop stood still as it was set."""

    def _complete(self, flight):
        if flight.batch.step_id % 2 == 0 and not flight.due:
            flight.due = True
            asyncio.get_running_loop().call_later(0.003, super()._complete, flight)
        else:
            super()._complete(flight)


class TestSyntheticOvertaken(TestSyntheticThatTakesTime):
    def make(self, limits):
        return Overtaken(SyntheticConfig(**self.config), limits)


class TestDense(TestSynthetic):
    config = {"num_moe_layers": 0}  # noqa: RUF012


@pytest.mark.ci
class TestDenseWithRows(TestSynthetic):
    config = {**TestSynthetic.config, "num_moe_layers": 0}  # noqa: RUF012


@pytest.mark.ci
class TestBehindEdges(TestSynthetic):
    def make(self, limits):
        return FaultRunner(super().make(limits), Random(1), max_delay_s=0.002)


@pytest.mark.ci
@pytest.mark.usefixtures("forked_children")
class TestInAWorker(TestSynthetic):
    def make(self, limits):
        return WorkerRunner("synthetic", dict(self.config), limits, close_deadline_s=120.0)


# -- the suite finds broken runners -----------------------------------------------------------------------


class _BrokenRuns(SyntheticRunner):
    """Ways in which runs can be wrong."""

    way = ""

    def launch(self, step):
        if self.way == "no end of room":
            # as if every block table went on, in a block of nobody's
            for lane, count in enumerate(self.lanes.num_blocks.tolist()):
                self.lanes.blocks[lane, count : count + 1] = 20
            self.lanes.num_blocks += 1
            self.lanes.place((20,), (3,), (1,))
        if self.way == "a step late" and self._flights and not step.chunks:
            # as if only one token of the step in flight had been accepted
            batch = self._flights[-1].batch
            decodes = batch.lanes[: batch.num_decodes]
            self.lanes.length[decodes] = np.minimum(self.lanes.length[decodes], batch.starts[: batch.num_decodes] + 1)
        if self.way == "a full table stays full":
            step = msgspec.structs.replace(step, appends=())
        return super().launch(step)

    def _draft(self, batch, number, first):
        drafts = super()._draft(batch, number, first)
        if self.way == "one at a time":
            drafts[1:] = [(token + 1) % self.config.vocab_size for token in drafts[1:]]
        return drafts

    def _verify(self, batch, drafts, digests, rows):
        index, generations = batch.aux_index, batch.generations
        output, kept = super()._verify(batch, drafts, digests, rows)
        counts = output.counts
        if self.way == "one token at least" and 0 in counts:
            return msgspec.structs.replace(
                output, tokens=(*output.tokens, 0), counts=tuple(max(c, 1) for c in counts)
            ), kept
        if self.way == "rows of what does not stand":
            batch.aux_index, batch.generations = index, generations
            return output, rows
        if self.way == "the last run first":
            ends = np.cumsum(counts).tolist()
            runs = [output.tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
            tokens = tuple(token for run in runs[::-1] for token in run)
            return msgspec.structs.replace(output, tokens=tokens, counts=counts[::-1]), kept
        if self.way == "log-probs of the first" and output.raw:
            return msgspec.structs.replace(output, raw=output.raw[:1] * len(output.raw)), kept
        return output, kept


@pytest.mark.ci(after=5)
@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("rows of what does not stand", "test_positions_behind_a_run_have_no_rows"),
        ("no end of room", "test_a_run_ends_where_the_block_table_does"),
        ("the last run first", "test_each_sequence_of_a_step_has_its_run"),
        ("log-probs of the first", "test_log_probs_stand_beside_their_tokens"),
        ("one token at least", "test_a_run_ends_where_the_block_table_does"),
        ("one at a time", "test_runs_are_what_one_token_a_step_gives"),
        ("a step late", "test_steps_that_overlap_go_on_where_the_run_before_ended"),
        ("a full table stays full", "test_a_step_that_overlaps_yields_nothing_where_the_one_before_filled_the_table"),
    ],
)
def test_the_suite_finds_wrong_runs(way, test):
    class Broken(_BrokenRuns):
        pass

    class Suite(TestSyntheticRuns):
        # it checks nothing itself
        config = {"values_spec": True}  # noqa: RUF012

        def make(self, limits):
            return Broken(SyntheticConfig(**self.config, max_run_tokens=4), limits)

    getattr(Suite(), test)()
    Broken.way = way
    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


class _BrokenDrafts(SyntheticRunner):
    """Ways in which drafts can be followed wrongly."""

    way = ""

    def _plan(self, step):
        if self.way == "drops what was left" and step.drafts is not None:
            for key, start, first in zip(step.drafts.keys, step.drafts.starts, step.drafts.tokens[::4], strict=False):
                lane = self.lanes.lane_of(key)
                if start <= self.lanes.length[lane] and self.lanes.tokens[lane][start] != first:
                    step = msgspec.structs.replace(step, drafts=None)
        batch = super()._plan(step)
        if self.way == "never looks":
            self._host_drafts = {lane: [6] * len(drafts) for lane, drafts in self._host_drafts.items()}
        if self.way == "the lane beside":
            self._host_drafts = dict(zip(self._host_drafts, list(self._host_drafts.values())[::-1], strict=True))
        return batch

    def _verify(self, batch, drafts, digests, rows):
        index, generations = batch.aux_index, batch.generations
        output, kept = super()._verify(batch, drafts, digests, rows)
        if self.way == "rows of what does not stand":
            batch.aux_index, batch.generations = index, generations
            return output, rows
        if self.way == "the first again" and len(output.tokens) > 1:
            return msgspec.structs.replace(output, tokens=output.tokens[:1] * len(output.tokens)), kept
        return output, kept


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("never looks", "test_what_is_right_is_accepted"),
        ("never looks", "test_a_step_goes_on_where_the_path_leads_it"),
        ("drops what was left", "test_a_path_that_was_wrong_is_followed_on"),
        ("the lane beside", "test_each_sequence_has_its_own_drafts"),
        ("rows of what does not stand", "test_positions_behind_a_rejected_draft_have_no_rows"),
        ("the first again", "test_whatever_is_drafted_tokens_and_rows_stay"),
    ],
)
def test_the_suite_finds_drafts_that_are_followed_wrongly(way, test):
    class Broken(_BrokenDrafts):
        pass

    class Suite(TestSyntheticDrafts):
        # it checks nothing itself
        config = {"values_spec": True}  # noqa: RUF012

        def make(self, limits):
            return Broken(SyntheticConfig(**self.config), limits)

    getattr(Suite(), test)()
    Broken.way = way
    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


class _Broken(SyntheticRunner):
    """Ways to be wrong that a suite must not let pass."""

    way = ""

    def launch(self, step):
        if self.way == "tails are fresh":
            # a new use of the slot, as for a block of which nothing is there
            starts = [
                msgspec.structs.replace(start, generations=tuple([number + 1 for number in start.generations]))
                for start in step.starts
            ]
            step = msgspec.structs.replace(step, starts=tuple(starts))
        for start in step.starts:
            column, offset = divmod(start.num_cached, self._block_tokens)
            if offset and self.way == "clears tails":
                self._kv.reshape(-1, self._block_tokens)[start.blocks[column]] = 0
        done = super().launch(step)
        if self.way == "out of order" and len(self._flights) == 2:
            done.set_result(StepOutput(step.step_id, (0,)))
        return done

    def _write_rows(self, flight):
        rows = flight.rows
        if self.way == "leaves a spec out":
            del rows["values"]
        if self.way == "another dtype":
            rows["values"] = rows["values"].astype(np.float32)
        if self.way == "another shape":
            rows["routing"] = rows["routing"][:, :1]
        if self.way == "rows for some":
            rows["values"] = rows["values"][:1]
        if self.way == "unknown rows":
            rows["more"] = rows["values"]
        if self.way == "no rows":
            return None
        if self.way == "behind the arena's back" and self._arena is not None:
            # as a runner that has a writer of its own
            index = flight.batch.aux_index
            self._arena.rows["routing"][index] = rows["routing"]
            self._arena._tags[index] = flight.batch.generations
            return None
        return super()._write_rows(flight)

    def _complete(self, flight):
        if self.way == "late rows":
            arena, self._arena = self._arena, None
            super()._complete(flight)
            self._arena = arena
            where = flight.batch.aux_index, flight.batch.generations, flight.rows
            flight.done.get_loop().call_later(0.01, lambda: self._arena and self._arena.scatter(*where))
        else:
            super()._complete(flight)

    def _sample(self, batch, digests, places):
        if self.way == "knows no bias":
            return self.oracle.sample(digests, self._noise(batch, places), self.weights_id)
        tokens = super()._sample(batch, digests, places)
        if self.way == "one bias for all" and (self.lanes.samplers[1] is not None and self.lanes.samplers[1].bias_ids):
            tokens[:] = next(iter(self.lanes.samplers[1].logit_bias()))
        return tokens

    def _scores(self, batch, digests):
        scores = super()._scores(batch, digests)
        if self.way == "scores one too far":
            return super()._scores(batch, np.roll(digests, -1))
        if self.way == "scores from each chunk's start":
            return tuple([msgspec.structs.replace(run, start=1) for run in scores])
        return () if self.way == "scores nothing" else scores

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
        if self.way == "reads past tails":
            for at, start in zip(np.cumsum(batch.counts) - batch.counts, batch.starts, strict=True):
                past = int(batch.kv_index[at]) + 1
                if start % self._block_tokens and past % self._block_tokens:
                    # as a sum over a whole block does, with a weight of 0 for what is masked
                    self._kv[past - 2] ^= self._kv[past] & U64(1 << 63)
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


@pytest.mark.ci(after=17)
@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("late rows", "test_rows_are_there_at_completion_under_their_generation"),
        ("generation", "test_rows_are_there_at_completion_under_their_generation"),
        ("slots are blocks", "test_rows_are_there_at_completion_under_their_generation"),
        ("leaves a spec out", "test_a_step_writes_every_spec_of_every_row"),
        ("another dtype", "test_a_step_writes_every_spec_of_every_row"),
        ("another shape", "test_a_step_writes_every_spec_of_every_row"),
        ("rows for some", "test_a_step_writes_every_spec_of_every_row"),
        ("unknown rows", "test_a_step_writes_every_spec_of_every_row"),
        ("no rows", "test_a_step_writes_every_spec_of_every_row"),
        ("behind the arena's back", "test_a_step_writes_every_spec_of_every_row"),
        ("out of order", "test_steps_overlap_and_complete_in_order"),
        ("noise by batch", "test_noise_is_of_seed_index_and_position_alone"),
        ("blind to the cache", "test_cached_blocks_are_read_not_computed"),
        ("knows no bias", "test_a_bias_forces_and_bars_tokens"),
        ("knows no bias", "test_raw_log_probs_know_no_bias"),
        ("one bias for all", "test_a_bias_is_of_one_sequence_alone"),
        ("scores nothing", "test_prompts_are_scored_where_a_sequence_wants_it"),
        ("scores one too far", "test_what_scores_a_token_is_what_samples_one"),
        ("scores from each chunk's start", "test_chunks_and_cached_blocks_score_what_is_left"),
        # its end is waited for in real time
        pytest.param("aclose leaves futures", "test_aclose_at_any_time", marks=pytest.mark.ci),
        ("copies move rows", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("copies nothing", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("copies nothing", "test_a_host_block_is_what_was_written_last"),
        ("copies nothing", "test_copies_in_flight_with_steps_between_them"),
        ("copies nothing", "test_a_copy_that_makes_no_sense_fails"),
        ("mixes blocks up", "test_swapped_out_and_in_elsewhere_blocks_answer_as_before"),
        ("mixes blocks up", "test_many_blocks_in_one_copy"),
        ("first block only", "test_many_blocks_in_one_copy"),
        ("clears tails", "test_a_sequence_begun_elsewhere_goes_on_in_the_middle_of_a_block"),
        ("clears tails", "test_a_tail_that_was_swapped_goes_on_in_its_slot"),
        ("tails are fresh", "test_a_sequence_begun_elsewhere_goes_on_after_one_token_of_a_block"),
        ("tails are fresh", "test_a_sequence_begun_elsewhere_goes_on_with_the_last_token_of_a_block"),
        ("tails are fresh", "test_a_sequence_begun_elsewhere_goes_on_in_its_only_block"),
        ("reads past tails", "test_what_lies_past_the_tokens_of_a_tail_counts_for_nothing"),
        ("copies nothing", "test_a_sequence_begun_elsewhere_goes_on_in_a_fresh_block"),
        ("copies nothing", "test_a_sequence_begun_elsewhere_may_have_more_to_compute"),
        ("keeps its weights", "test_tensors_change_the_answers_and_back"),
        ("takes any tensor", "test_tensors_that_do_not_fit_change_nothing"),
    ],
)
def test_the_suite_finds_broken_runners(way, test):
    class Suite(TestSynthetic):
        config = {"step_s": 0.2} if way == "aclose leaves futures" else {"values_spec": True}

        def make(self, limits):
            runner = _Broken(SyntheticConfig(**self.config), limits)
            runner.way = way
            return runner

        # `make_of` gives sound ones: what the broken one is compared with

    with pytest.raises((AssertionError, InvariantBroken)):
        getattr(Suite(), test)()


@pytest.mark.parametrize("weights_id", [0, (1 << 63) - 1, (1 << 63), (1 << 64) - 1])
async def test_every_64_bits_are_weights(weights_id):
    async with synthetic_engine() as engine:
        await engine.update_weights(1, [("weights", "uint64", (1,), weights_id.to_bytes(8, "little"))])
        result = await engine.complete([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0))
        oracle = Oracle(msgspec.structs.replace(oracle_of(engine.config).config, weights_id=weights_id))
        check_sample(result.samples[0], [1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0), oracle)


async def test_free_steps_stamp_no_kv_so_stamps_are_refused_with_them():
    limits = RunnerLimits(max_running=1, max_step_tokens=8)
    for values in ({"free": True}, {"pass_stamp": True}):
        await SyntheticRunner(SyntheticConfig(**values), limits).open()
    with pytest.raises(BadInput, match="pass_stamp"):
        await SyntheticRunner(SyntheticConfig(free=True, pass_stamp=True), limits).open()
