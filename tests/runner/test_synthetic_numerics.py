"""Fixed numerics on the synthetic runner: what it answers, and that the suite finds runners whose bits depend on more
than the prefix. The suite itself runs in `test_synthetic.py`."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fdasync.errors import ConfigError
from fdasync.events.actions import SwapIn
from fdasync.runner.base import RunnerLimits
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import U64, SyntheticConfig
from fdasync.testing import RunnerTests

LIMITS = RunnerLimits(max_running=4, max_step_tokens=64)


def nudged(values):
    """The next float32 of each value: its last bit is another."""
    return tuple(np.nextafter(np.array(values, np.float32), np.float32(-np.inf)).tolist())


class Wrong(SyntheticRunner):
    """Its log-probs or rows are wrong in the last bit, in one way."""

    way = ""
    swapped = False

    def _logprobs(self, batch, tokens, every, last):
        output = super()._logprobs(batch, tokens, every, last)
        chunk = batch.num_decodes < len(batch.lanes)
        wrong = {
            "by batch": len(batch.lanes) > 1,
            "by width of a decode": len(batch.lanes) == 4 and not chunk,
            "by chunk": chunk and batch.starts[-1] > 0 and batch.counts[-1] == self._block_tokens,
            "by hit": chunk and batch.starts[-1] == 2 * self._block_tokens,
            "by way of computing": chunk and batch.positions[-1] > 2 * self._block_tokens + 2,
            "after a swap": self.swapped,
        }
        if output.raw is None or not wrong.get(self.way, False):
            return output
        return msgspec.structs.replace(output, raw=nudged(output.raw), processed=nudged(output.processed))

    def _scores(self, batch, digests):
        scores = super()._scores(batch, digests)
        if self.way != "scores":
            return scores
        return tuple(
            [
                msgspec.structs.replace(
                    run, logprobs=np.array(nudged(np.frombuffer(run.logprobs, "<f4")), "<f4").tobytes()
                )
                for run in scores
            ]
        )

    def _compute(self, batch):
        output, rows = super()._compute(batch)
        if self.way == "KV by batch" and len(batch.lanes) > 1:
            # the numbers of this step are right: those of later ones are not
            self._kv[batch.kv_index] ^= U64(1)
        if self.way == "rows by chunk" and len(batch.positions) == self._block_tokens + 3:
            rows["values"] = np.nextafter(rows["values"], np.float16(np.inf))
        return output, rows

    def copy(self, copy):
        self.swapped |= isinstance(copy, SwapIn)
        return super().copy(copy)


class Suite(RunnerTests):
    __test__ = False
    way = ""

    def make(self, limits):
        runner = Wrong(SyntheticConfig(values_spec=True), limits)
        runner.way = self.way
        return runner


@pytest.mark.ci(after=5)
@pytest.mark.parametrize(
    ("way", "test"),
    [
        ("by batch", "test_fixed_numbers_are_the_same_in_batches"),
        ("by width of a decode", "test_fixed_numbers_are_the_same_in_batches"),
        ("KV by batch", "test_fixed_numbers_are_the_same_in_batches"),
        ("by chunk", "test_fixed_numbers_are_the_same_in_chunks_and_behind_hits"),
        ("rows by chunk", "test_fixed_numbers_are_the_same_in_chunks_and_behind_hits"),
        ("by hit", "test_fixed_numbers_are_the_same_in_chunks_and_behind_hits"),
        ("by way of computing", "test_fixed_numbers_are_the_same_after_a_preemption"),
        ("after a swap", "test_fixed_numbers_are_the_same_after_swaps_and_elsewhere"),
        ("scores", "test_fixed_scores_are_the_log_probs_of_samples"),
    ],
)
def test_the_suite_finds_a_last_bit_that_differs(way, test):
    suite = Suite()
    getattr(suite, test)()
    suite.way = way
    with pytest.raises(AssertionError, match=r"of a sequence |of sampled tokens"):
        getattr(suite, test)()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_runner_that_does_not_answer_fixed_is_skipped_with_a_word(refuses):
    class Default(SyntheticRunner):
        async def open(self):
            if refuses:
                raise ConfigError("config.numerics", "recurrent layers have no fixed order")
            return msgspec.structs.replace(await super().open(), numerics="default")

    class Skipped(Suite):
        def make(self, limits):
            return Default(SyntheticConfig(), limits)

    said = "the runner refuses: .*recurrent layers" if refuses else "the runner promises 'default'"
    with pytest.raises(pytest.skip.Exception, match=said):
        Skipped().test_fixed_numbers_are_the_same_in_batches()


def test_an_error_of_another_key_is_no_reason_to_skip():
    class Broken(Suite):
        def make(self, limits):
            raise ConfigError("config.block_tokens", "is odd")

    with pytest.raises(ConfigError, match="block_tokens"):
        Broken().test_fixed_numbers_are_the_same_in_batches()


@pytest.mark.parametrize("numerics", ["default", "fixed"])
async def test_it_answers_what_it_was_asked(numerics):
    limits = msgspec.structs.replace(LIMITS, numerics=numerics)
    assert (await SyntheticRunner(SyntheticConfig(), limits).open()).numerics == numerics
    # a free step follows from the last token, not from the prefix
    assert (await SyntheticRunner(SyntheticConfig(free=True), limits).open()).numerics == "default"
