"""Conformance of runners: logit bias, and log-probs of prompts. Mixed into `RunnerTests`."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.events.actions import Chunk
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fdasync.request import SamplerSpec
    from fdasync.runner.base import PromptScores


def biased(sampler: SamplerSpec, bias: Mapping[int, float]) -> SamplerSpec:
    """The sampler with this logit bias."""
    ids, values = array("i", bias).tobytes(), array("f", bias.values()).tobytes()
    return msgspec.structs.replace(sampler, bias_ids=ids, bias_values=values)


class ScoreTests(RunnerSuite):
    """See the module."""

    @on_loop
    async def test_a_bias_forces_and_bars_tokens(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(on.size - 2)
            for name, sampler in (("greedy", GREEDY), ("at temperature 1", noisy(3))):
                plain = (await on.answer(0, prompt, 4, [0, 1], sampler=sampler)).tokens
                forced = (plain[0] + 1) % on.capacity.vocab_size
                own = biased(sampler, {forced: 100.0})
                tokens = (await on.answer(1, prompt, 4, [2, 3], sampler=own)).tokens
                equal(tokens, [forced] * 4, f"tokens sampled {name} under a bias of 100 for {forced}")
                own = biased(sampler, dict.fromkeys(plain, -100.0))
                tokens = (await on.answer(2, prompt, 4, [4, 5], sampler=own)).tokens
                check(not set(tokens) & set(plain), f"tokens sampled {name} under a bias of -100 for {plain}", tokens)

    @on_loop
    async def test_a_bias_is_of_one_sequence_alone(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompts = [on.prompt(5, salt=salt) for salt in range(3)]
            alone = [(await on.answer(key, prompts[key], 3, [key])).tokens for key in range(3)]
            forced = (alone[1][0] + 1) % on.capacity.vocab_size
            samplers = [GREEDY, biased(GREEDY, {forced: 100.0}), GREEDY]
            starts = [on.start(10 + key, prompts[key], [key], sampler=samplers[key]) for key in range(3)]
            steps = [(await on.launch_prefill(*starts)).tokens, await on.step(), await on.step()]
            for key, want in enumerate((alone[0], [forced] * 3, alone[2])):
                equal([step[key] for step in steps], want, f"tokens of sequence {key} beside one with a bias")

    @on_loop
    async def test_raw_log_probs_know_no_bias(self) -> None:
        if not self.logprobs:
            return
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(5)
            wants = msgspec.structs.replace(GREEDY, raw=True, processed=True, top=1)
            plain = await on.launch_prefill(on.start(0, prompt, [0], sampler=wants))
            assert plain.top is not None, f"alternatives of a sequence that wants them: {plain}"
            forced = (plain.tokens[0] + 1) % on.capacity.vocab_size
            output = await on.launch_prefill(on.start(1, prompt, [1], sampler=biased(wants, {forced: 100.0})))
            assert output.raw is not None, f"raw log-probs of a step where a sequence wants them: {output}"
            assert output.processed is not None, f"processed log-probs of a step where a sequence wants them: {output}"
            assert output.top is not None, f"alternatives of a step where a sequence wants them: {output}"
            # the sequence before it decodes in the same step
            equal(output.tokens[1], forced, "a token under a bias of 100")
            first, best = plain.top[0], output.top[1]
            assert first is not None, f"alternatives of the sequence that wants them: {plain.top}"
            assert best is not None, f"alternatives of the sequence that wants them: {output.top}"
            equal(best.token_ids, first.token_ids, "alternatives by raw log-probs, which have no bias in them")
            distance = abs(best.logprobs[0] - first.logprobs[0])
            check(distance <= max(self.logprob_error, 1e-6), "a raw log-prob, with a bias and without", distance)
            check(output.raw[1] < output.processed[1], f"raw, below processed {output.processed[1]}", output.raw[1])

    # -- log-probs of prompts -------------------------------------------------------------------------

    @on_loop
    async def test_prompts_are_scored_where_a_sequence_wants_it(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if not on.capacity.scores_prompts:
                return
            prompt = on.prompt(2 * on.size + 3)
            starts = [on.start(0, prompt, [0, 1, 2], sampler=scored(0, 2)), on.start(1, on.prompt(4, salt=1), [3])]
            output = await on.launch_prefill(*starts)
            equal([run.key for run in output.scores], [0], "sequences whose prompts a step scored")
            run = output.scores[0]
            equal((run.start, run.count, run.top), (1, len(prompt) - 1, 2), "first position, count, alternatives")
            values, ids, best = parts(run)
            check(bool((values <= 0.0).all()), "log-probs are not above 0", values.max())
            check(bool(np.isfinite(values).all()), "log-probs of tokens are finite", values)
            check(bool((best[:, 0] >= values - self.logprob_error).all()), "the best alternative is as likely", best)
            for position, (token, row) in enumerate(zip(prompt[1:], ids.tolist(), strict=True), 1):
                if token in row:
                    distance = abs(float(best[position - 1][row.index(token)] - values[position - 1]))
                    check(distance <= 1e-5, f"log-prob of token {position} among the alternatives", distance)
            equal((await on.launch()).scores, (), "scores of a step that only decodes")

    @on_loop
    async def test_what_scores_a_token_is_what_samples_one(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if not (on.capacity.scores_prompts and self.logprobs):
                return
            prompt = on.prompt(on.size + 2)
            wants = msgspec.structs.replace(GREEDY, raw=True)
            first = await on.launch_prefill(on.start(0, prompt, [0, 1], sampler=wants))
            assert first.raw is not None, f"raw log-probs of a step where a sequence wants them: {first}"
            longer = [*prompt, first.tokens[0]]
            start = on.start(1, longer, [2, 3], sampler=scored(len(prompt)))
            output = await on.launch(starts=[start], chunks=[Chunk(1, len(longer), True)], skips=[0])
            run = output.scores[0]
            equal((run.start, run.count), (len(prompt), 1), "first position and count of a prompt's last token alone")
            distance = abs(float(parts(run)[0][0]) - first.raw[0])
            check(distance <= max(self.logprob_error, 1e-5), "log-prob of a token, sampled and in a prompt", distance)

    @on_loop
    async def test_chunks_and_cached_blocks_score_what_is_left(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if not on.capacity.scores_prompts:
                return
            prompt = on.prompt(2 * on.size + 5)
            whole = (await on.launch_prefill(on.start(0, prompt, [0, 1, 2], sampler=scored(0, 3)))).scores
            await on.leave(0)
            cuts = [3, on.size, len(prompt) - on.size - 3]
            start = on.start(1, prompt, [5, 4, 3], sampler=scored(2, 3))
            runs = list((await on.launch(starts=[start], chunks=[Chunk(1, cuts[0], False)])).scores)
            runs += (await on.launch(chunks=[Chunk(1, cuts[1], False)])).scores
            runs += (await on.launch(chunks=[Chunk(1, cuts[2], True)])).scores
            starts = [2, cuts[0] + 1, cuts[0] + cuts[1] + 1]
            equal([run.start for run in runs], starts, "first positions of the runs of three chunks")
            self._assert_scores(runs, whole[0])
            await on.leave(1)
            # a sequence that goes on behind cached blocks, with tokens of its output
            known = [*prompt, *on.prompt(3, salt=5)]
            sampler = scored(on.size + 1, 3)
            start = on.start(2, known, [5, 4, 3], cached=on.size, prompt_len=len(prompt), sampler=sampler)
            runs = list((await on.launch_prefill(start)).scores)
            equal([(run.start, run.count) for run in runs], [(on.size + 1, on.size + 4)], "run behind a cached block")
            self._assert_scores(runs, whole[0])

    def _assert_scores(self, runs: Sequence[PromptScores], whole: PromptScores) -> None:
        """Each run must be a part of the whole."""
        wanted = parts(whole)
        for run in runs:
            values, ids, best = parts(run)
            places = slice(run.start - whole.start, run.start - whole.start + run.count)
            for found, want, what in ((values, wanted[0], "log-probs"), (best, wanted[2], "alternatives' log-probs")):
                worst = float(np.abs(found - want[places]).max())
                check(worst <= self.logprob_error, f"{what} from position {run.start} on, computed another way", worst)
            if not self.logprob_error:
                equal(ids.tolist(), wanted[1][places].tolist(), f"alternatives from position {run.start} on")


def scored(start: int, top: int = 0) -> SamplerSpec:
    """A greedy sampler of a sequence whose prompt is scored from `start` on."""
    return msgspec.structs.replace(GREEDY, score_from=start, score_top=top)


def parts(run: PromptScores) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Log-probs [n], ids and log-probs of the alternatives [n, top]."""
    ids, best = np.frombuffer(run.top_ids, "<i4"), np.frombuffer(run.top_logprobs, "<f4")
    return np.frombuffer(run.logprobs, "<f4"), ids.reshape(run.count, run.top), best.reshape(run.count, run.top)
