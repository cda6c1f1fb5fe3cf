"""The conformance suite for runners that verify the host's drafts (`RunnerLimits.speculation`).

Adopt it beside `RunTests`, whose `make` then drafts by itself, or alone:

    class TestMyDrafts(DraftTests):
        def make(self, limits):
            return MyRunner(MyConfig(), limits)

Whatever a host drafts, tokens, log-probs and rows must be the same as without drafts. Right drafts are accepted, as far
as the step may; drafts that break the contract fail the step.
"""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.events.actions import Chunk, Drafts, path_tokens
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, Answer, noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite, is_runner_error
from fdasync.testing.runners.runs import columns_of, runs_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from fdasync.request import SamplerSpec
    from fdasync.runner.base import StepOutput
    from fdasync.testing.runners.bench import Bench

    # (stream, known length, most tokens) -> start of the path, and its tokens
    Guess = Callable[[list[int], int, int], tuple[int, list[int]]]

_TABLES = ([0, 5, 2, 7], [1, 8, 3, 9], [4, 10, 6, 11])
_SPECULATION = 3


def _wrong(token: int) -> int:
    return token - 1 if token else 1


def _right(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return known, stream[known : known + most]


def _half_right(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return known, [token if (known + at) % 3 else _wrong(token) for at, token in enumerate(stream[known:][:most])]


def _from_the_past(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    start = max(known - 2, 1)
    return start, stream[start : start + most]


def _another_past(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    start = max(known - 2, 1)
    return start, [_wrong(stream[start]), *stream[start + 1 : start + most]]


def _passed(stream: list[int], known: int, _most: int) -> tuple[int, list[int]]:
    return 1, stream[1 : min(known, 3)] or [0]


def _from_the_future(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return known + 8, stream[known : known + most]


def _far_away(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return 1 << 40, stream[known : known + most]


def _no_ids(stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return known, [stream[known], -1, (1 << 31) - 1, -(1 << 31)][:most]


def _no_ids_at_once(_stream: list[int], known: int, most: int) -> tuple[int, list[int]]:
    return known, [(1 << 31) - 1] * most


_GUESSES: tuple[Guess, ...] = (
    _right, _half_right, _from_the_past, _another_past, _passed, _from_the_future, _far_away, _no_ids, _no_ids_at_once,
)  # fmt: skip


class DraftTests(RunnerSuite):
    """Subclass it, name the subclass Test..., define `make`; more in `RunnerSuite`."""

    limits = msgspec.structs.replace(RunnerSuite.limits, speculation=_SPECULATION)

    @on_loop
    async def test_capacity_says_that_it_verifies(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            equal(on.capacity.max_run_tokens, 1 + self.limits.speculation, "max_run_tokens of a runner that verifies")
        async with on_bench(self.make(msgspec.structs.replace(self.limits, speculation=0))) as on:
            equal(on.capacity.max_run_tokens, 1, "max_run_tokens where no step has drafts")

    @on_loop
    async def test_whatever_is_drafted_tokens_and_rows_stay(self) -> None:
        for overlap in (False, True) if self.overlaps else (False,):
            for sampler in (GREEDY, noisy(3, 1)):
                await self._compare(sampler, overlap=overlap)

    async def _compare(self, sampler: SamplerSpec, *, overlap: bool) -> None:
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as plain, on_bench(self.make(self.limits)) as on:
            size = on.size
            for length in (3, size - 1):
                prompt = on.prompt(length)
                stream = prompt + (await plain.answer(length, prompt, 3 * size, _TABLES[0], sampler=sampler)).tokens
                count = 2 * size
                wanted = await plain.answer(length, prompt, count, _TABLES[0], sampler=sampler)
                for key, guess in enumerate(_GUESSES, 10 * length):
                    decode = _two_at_a_time if overlap else _one_at_a_time
                    outputs = await decode(on, key, prompt, stream, guess, count, sampler)
                    tokens = [token for output in outputs for token in output.tokens][:count]
                    said = f"tokens with drafts that are {guess.__name__[1:].replace('_', ' ')}"
                    equal(tokens, wanted.tokens, said)
                    self.assert_same(wanted, Answer(tokens, on.rows(_TABLES[1], 0, length + count - 1)))
                    await on.leave(key)

    @asynccontextmanager
    async def _begun(self) -> AsyncIterator[tuple[Bench, list[int], int]]:
        """A bench on which sequence 0 has its first token; the stream that it follows, and how much of it is known."""
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as plain, on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(4)
            stream = prompt + (await plain.answer(0, prompt, 16, _TABLES[0])).tokens
            await on.launch_prefill(on.start(0, prompt, [1]))
            yield on, stream, len(prompt) + 1

    @on_loop
    async def test_what_is_right_is_accepted(self) -> None:
        async with self._begun() as (on, stream, known):
            appends = [on.append(0, 8)]
            for most, start in ((3, known), (2, known + 4), (1, known + 7), (3, known + 5)):
                drafts = drafts_of({0: (start, stream[start : start + 7], most)})
                (run,) = runs_of(await on.launch(appends=appends, drafts=drafts))
                equal(run, stream[known : known + most + 1], f"the run of a step with {most} right drafts")
                known += len(run)
                appends = []
            (run,) = runs_of(await on.launch())
            equal(run, stream[known : known + 1], "the run of a step without drafts")

    @on_loop
    async def test_a_step_goes_on_where_the_path_leads_it(self) -> None:
        """One path of the longest length serves steps that overlap: the host knows nothing of the one in flight."""
        if not self.overlaps:
            return
        async with self._begun() as (on, stream, start):
            path = stream[start : start + path_tokens(_SPECULATION, 2)]
            drafts = drafts_of({0: (start, path, _SPECULATION)})
            first, second = on.launch(drafts=drafts), on.launch(drafts=drafts)
            equal(runs_of(await first), [stream[start : start + 4]], "the run of the first step")
            equal(runs_of(await second), [stream[start + 4 : start + 8]], "the run of the step behind it")

    @on_loop
    async def test_a_path_that_was_wrong_is_followed_on(self) -> None:
        """Its tokens for positions that the sequence has count no more: those behind them are drafts."""
        async with self._begun() as (on, stream, start):
            path = [_wrong(stream[start]), *stream[start + 1 : start + _SPECULATION]]
            drafts = drafts_of({0: (start, path, _SPECULATION)})
            equal(runs_of(await on.launch(drafts=drafts)), [stream[start : start + 1]], "the run of a wrong draft")
            equal(runs_of(await on.launch(drafts=drafts)), [stream[start + 1 : start + 4]], "the run behind it")

    @on_loop
    async def test_each_sequence_has_its_own_drafts(self) -> None:
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as plain, on_bench(self.make(self.limits)) as on:
            prompts = [on.prompt(length, salt=7) for length in (3, 9, 5)]
            streams = [
                prompt + (await plain.answer(key, prompt, 12, _TABLES[key])).tokens
                for key, prompt in enumerate(prompts)
            ]
            await on.launch_prefill(*[on.start(key, prompts[key], [key]) for key in (0, 1)])
            right, wrong = len(prompts[1]) + 1, len(prompts[0]) + 1
            drafts = drafts_of(
                {1: (right, streams[1][right : right + 3], 3), 0: (wrong, list(map(_wrong, streams[0][wrong:][:3])), 3)}
            )
            start = on.start(2, prompts[2], [2])
            runs = runs_of(await on.launch(starts=[start], chunks=[Chunk(2, 5, True)], drafts=drafts))
            wanted = [streams[0][wrong : wrong + 1], streams[1][right : right + 4], streams[2][5:6]]
            equal(runs, wanted, "runs of wrong drafts, of right ones, and of a sequence that begins")

    @on_loop
    async def test_positions_behind_a_rejected_draft_have_no_rows(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.arena is None:
                return
            prompt = on.prompt(3)
            await on.launch_prefill(on.start(0, prompt, [0]))
            (run,) = runs_of(await on.launch(drafts=drafts_of({0: (4, [0, 0, 0], 3)})))
            check(len(run) < 4, "a draft of zeros is rejected", run)
            stop = 3 + len(run)
            on.rows([0], 0, stop)
            try:
                on.rows([0], stop, stop + 1)
            except InvariantBroken:
                return
            raise AssertionError(f"row {stop} is there, behind a run of {len(run)} tokens from 3 on")

    @on_loop
    async def test_log_probs_stand_beside_their_tokens(self) -> None:
        if not self.logprobs:
            return
        without = msgspec.structs.replace(self.limits, speculation=0)
        async with on_bench(self.make(without)) as plain, on_bench(self.make(self.limits)) as on:
            sampler = msgspec.structs.replace(noisy(3), raw=True, processed=True, top=3)
            prompt = on.prompt(6)
            stream = prompt + (await plain.answer(1, prompt, 30, _TABLES[0], sampler=sampler)).tokens
            columns = []
            for bench, guess in ((plain, None), (on, _half_right)):
                outputs = await _one_at_a_time(bench, 0, prompt, stream, guess, 12, sampler)
                columns.append([entry for output in outputs for entry in columns_of(output)][:12])
            equal([entry[0] for entry in columns[1]], [entry[0] for entry in columns[0]], "tokens with log-probs")
            for name, number in (("raw", 1), ("processed", 2)):
                one, other = (np.array([entry[number] for entry in column]) for column in columns)
                apart = float(np.abs(one - other).max())
                check(apart <= self.logprob_error, f"{name} log-probs are at most {self.logprob_error} apart", apart)

    @on_loop
    async def test_drafts_that_do_not_fit_fail_the_step(self) -> None:
        path = [1] * (path_tokens(_SPECULATION, self.limits.pipeline_depth) + 1)
        good = drafts_of({0: (4, [1, 2], 2)})
        replace = msgspec.structs.replace
        for drafts in (
            drafts_of({0: (4, path, 3)}),
            drafts_of({0: (4, [1], 4)}),
            drafts_of({0: (4, [1], 0)}),
            drafts_of({0: (0, [1], 1)}),
            drafts_of({5: (4, [1], 1)}),
            replace(good, tokens=good.tokens[:-1]),
            replace(good, tokens=good.tokens + b"\0\0\0\0"),
            replace(good, counts=(-2,)),
            replace(good, starts=()),
            replace(good, keys=(0, 0), starts=(4, 4), counts=(1, 1), most=(1, 1)),
        ):
            async with on_bench(self.make(self.limits)) as on:
                await on.launch_prefill(on.start(0, on.prompt(3), [0]))
                step = on.launch(drafts=drafts)
                await asyncio.wait([step])
                is_runner_error(step, f"a step with {drafts}")


def drafts_of(paths: dict[int, tuple[int, Sequence[int], int]]) -> Drafts:
    """`Drafts` made of each sequence's path: start, tokens, and most drafts to forward."""
    return Drafts(
        keys=tuple(paths),
        starts=tuple([start for start, _, _ in paths.values()]),
        counts=tuple([len(tokens) for _, tokens, _ in paths.values()]),
        most=tuple([most for _, _, most in paths.values()]),
        tokens=array("i", [token for _, tokens, _ in paths.values() for token in tokens]).tobytes(),
    )


def _drafts(on: Bench, key: int, stream: list[int], guess: Guess | None, known: int, depth: int) -> Drafts | None:
    most = on.capacity.max_run_tokens - 1
    if guess is None:
        return None
    start, tokens = guess(stream, known, path_tokens(most, depth))
    return drafts_of({key: (start, tokens, most)})


async def _one_at_a_time(
    on: Bench, key: int, prompt: Sequence[int], stream: list[int], guess: Guess | None, count: int, sampler: SamplerSpec
) -> list[StepOutput]:
    """Prefill in one step and decode with these drafts until there are `count` tokens."""
    start = on.start(key, prompt, _TABLES[1], sampler=sampler)
    outputs = [await on.launch_prefill(start)]
    tokens, num_blocks = 1, -(-len(prompt) // on.size)
    while tokens < count:
        appends = []
        while num_blocks * on.size < len(prompt) + tokens + on.capacity.max_run_tokens:
            appends.append(on.append(key, _TABLES[1][num_blocks]))
            num_blocks += 1
        drafts = _drafts(on, key, stream, guess, len(prompt) + tokens, 1)
        outputs.append(await on.launch(appends=appends, drafts=drafts))
        tokens += len(outputs[-1].tokens)
    return outputs


async def _two_at_a_time(
    on: Bench, key: int, prompt: Sequence[int], stream: list[int], guess: Guess | None, count: int, sampler: SamplerSpec
) -> list[StepOutput]:
    """The same with each step launched before the one before it has ended."""
    outputs: list[StepOutput] = []
    flying = [on.launch_prefill(on.start(key, prompt, _TABLES[1], sampler=sampler))]
    tokens, num_blocks, known = 0, -(-len(prompt) // on.size), len(prompt)
    while tokens < count:
        appends = []
        while num_blocks < 4 and num_blocks * on.size < known + 2 * on.capacity.max_run_tokens:
            appends.append(on.append(key, _TABLES[1][num_blocks]))
            num_blocks += 1
        drafts = _drafts(on, key, stream, guess, known, 2) if tokens else None
        flying.append(on.launch(appends=appends, drafts=drafts))
        outputs.append(await flying.pop(0))
        tokens += len(outputs[-1].tokens)
        known = len(prompt) + tokens
    return outputs + [await step for step in flying]
