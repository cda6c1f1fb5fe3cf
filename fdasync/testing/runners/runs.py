"""The conformance suite for runners whose steps may yield several tokens of a sequence (`Capacity.max_run_tokens`).

Adopt it beside `RunnerTests`, which tests the same runner where a step yields one token:

    class TestMyRuns(RunTests):
        def make(self, limits):
            return MyRunner(MyConfig(drafts=3), limits)

        def make_plain(self, limits):
            return MyRunner(MyConfig(drafts=0), limits)

Whatever runs a step yields, tokens, log-probs and rows must be the same as with one token a step, and only positions
that were forwarded with tokens of a run have rows. A sequence whose block table has no room left yields none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.events.actions import Chunk
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, Answer, noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.request import SamplerSpec
    from fdasync.runner.base import Runner, RunnerLimits, StepOutput
    from fdasync.testing.runners.bench import Bench

_TABLES = ([0, 5, 2, 7], [1, 8, 3, 9], [4, 10, 6, 11])


class RunTests(RunnerSuite):
    """Subclass it, name the subclass Test..., define `make` and `make_plain`; more in `RunnerSuite`."""

    def make_plain(self, limits: RunnerLimits) -> Runner:
        """A new runner, not opened, that answers like `make`'s runners, with one token a step."""
        raise NotImplementedError

    @on_loop
    async def test_runs_are_what_one_token_a_step_gives(self) -> None:
        longest = 0
        async with on_bench(self.make_plain(self.limits)) as plain, on_bench(self.make(self.limits)) as on:
            equal(plain.capacity.max_run_tokens, 1, "max_run_tokens of the runner of make_plain")
            check(on.capacity.max_run_tokens > 1, "max_run_tokens is above 1", on.capacity.max_run_tokens)
            size = on.size
            key = 0
            for length in (3, size - 2, size, size + 5):
                for sampler in (GREEDY, noisy(length, 1)):
                    key += 1
                    prompt = on.prompt(length)
                    wanted = await plain.answer(key, prompt, 2 * size, _TABLES[0], sampler=sampler)
                    outputs = await _decode(on, key, prompt, _TABLES[1], 2 * size, sampler)
                    runs = [run for output in outputs for run in runs_of(output)]
                    tokens = [token for run in runs for token in run][: 2 * size]
                    rows = on.rows(_TABLES[1], 0, length + 2 * size - 1)
                    self.assert_same(wanted, Answer(tokens, rows))
                    await on.leave(key)
                    most = max(map(len, runs))
                    check(most <= on.capacity.max_run_tokens, f"at most {on.capacity.max_run_tokens} tokens", most)
                    longest = max(longest, most)
        check(longest > 1, "some step yields more than one token", longest)

    @on_loop
    async def test_a_run_ends_where_the_block_table_does(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            most, size = on.capacity.max_run_tokens, on.size
            # every distance from the table's end at which a runner could yield a longer run
            ends = [(blocks, room) for blocks in (1, 2, 3) for room in range(1, most + 1)]
            for key, (blocks, room) in enumerate(ends):
                prompt = on.prompt(blocks * size - room, salt=room)
                await on.launch_prefill(on.start(key, prompt, _TABLES[0][:blocks]))
                (run,) = runs_of(await on.launch())
                check(1 <= len(run) <= room, f"a run where there is room for {room}", run)
                while len(run) < room:
                    run += runs_of(await on.launch())[0]
                equal(len(run), room, "tokens of runs that fill the block table")
                equal(runs_of(await on.launch()), [[]], "the run of a sequence whose block table is full")
                await on.leave(key)

    @on_loop
    async def test_steps_that_overlap_go_on_where_the_run_before_ended(self) -> None:
        if not self.overlaps:
            return
        async with on_bench(self.make_plain(self.limits)) as plain, on_bench(self.make(self.limits)) as on:
            size, count = on.size, 2 * on.size
            key = 0
            for length in (3, size - 1, size):
                for sampler in (GREEDY, noisy(length, 1)):
                    key += 1
                    prompt = on.prompt(length)
                    wanted = await plain.answer(key, prompt, count, _TABLES[0], sampler=sampler)
                    outputs = await _decode_two_at_a_time(on, key, prompt, _TABLES[1], count, sampler)
                    tokens = [token for output in outputs for token in output.tokens][:count]
                    equal(tokens, wanted.tokens, "tokens of steps that overlap")
                    self.assert_same(wanted, Answer(tokens, on.rows(_TABLES[1], 0, length + count - 1)))
                    await on.leave(key)

    @on_loop
    async def test_a_step_that_overlaps_yields_nothing_where_the_one_before_filled_the_table(self) -> None:
        if not self.overlaps:
            return
        async with on_bench(self.make_plain(self.limits)) as plain, on_bench(self.make(self.limits)) as on:
            size = on.size
            for key, room in enumerate((1, 2, 3)):
                prompt = on.prompt(size - room, salt=room)
                wanted = (await plain.answer(key, prompt, size, _TABLES[0])).tokens
                await on.launch_prefill(on.start(key, prompt, _TABLES[1][:1]))
                # more steps than the table has room for, two in flight at a time
                outputs, flying = [], [on.launch()]
                for _ in range(room + 1):
                    flying.append(on.launch())
                    outputs.append(await flying.pop(0))
                flying.append(on.launch(appends=[on.append(key, _TABLES[1][1])]))
                outputs += [await step for step in flying]
                runs = [run for output in outputs for run in runs_of(output)]
                equal(runs[-2], [], "the run of a step behind a full block table")
                check(runs[-1], "the block that was appended has room for a run", runs)
                tokens = [token for run in runs for token in run]
                equal(tokens, wanted[1 : 1 + len(tokens)], "tokens around a step that had no room")
                await on.leave(key)

    @on_loop
    async def test_positions_behind_a_run_have_no_rows(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.arena is None:
                return
            for salt in range(6):
                prompt = on.prompt(3, salt=salt)
                await on.launch_prefill(on.start(salt, prompt, [0]))
                (run,) = runs_of(await on.launch())
                stop = len(prompt) + len(run)
                on.rows([0], 0, stop)
                try:
                    on.rows([0], stop, stop + 1)
                except InvariantBroken:
                    await on.leave(salt)
                    continue
                raise AssertionError(f"row {stop} is there, behind a run of {len(run)} tokens from {len(prompt)} on")

    @on_loop
    async def test_each_sequence_of_a_step_has_its_run(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            size = on.size
            prompts = [on.prompt(length, salt=7) for length in (3, size - 1, 5)]
            alone = []
            for key, prompt in enumerate(prompts):
                outputs = await _decode(on, key, prompt, _TABLES[key], 8, GREEDY)
                alone.append([run for output in outputs for run in runs_of(output)])
                await on.leave(key)
            first = await on.launch_prefill(on.start(10, prompts[0], _TABLES[0]), on.start(11, prompts[1], _TABLES[1]))
            appends = [on.append(11, _TABLES[1][1])]
            start = on.start(12, prompts[2], _TABLES[2])
            # one decodes, one sits out, one samples its first token
            mixed = await on.launch(starts=[start], appends=appends, skips=[11], chunks=[Chunk(12, 5, True)])
            last = await on.launch()
            runs = [runs_of(output) for output in (first, mixed, last)]
            equal(runs[0], [alone[0][0], alone[1][0]], "first tokens of two, which are one each")
            equal(runs[1], [alone[0][1], alone[2][0]], "a run, and the first token of a sequence that joins")
            equal(runs[2], [alone[0][2], alone[1][1], alone[2][1]], "runs of three, in the order in which they joined")

    @on_loop
    async def test_log_probs_stand_beside_their_tokens(self) -> None:
        if not self.logprobs:
            return
        async with on_bench(self.make_plain(self.limits)) as plain, on_bench(self.make(self.limits)) as on:
            sampler = msgspec.structs.replace(noisy(3), raw=True, processed=True, top=3)
            prompt = on.prompt(6)
            columns = []
            for bench in (plain, on):
                outputs = await _decode(bench, 0, prompt, _TABLES[0], 12, sampler)
                columns.append([entry for output in outputs for entry in columns_of(output)][:12])
            tokens = [[entry[0] for entry in column] for column in columns]
            equal(tokens[1], tokens[0], "tokens of a sequence with log-probs")
            for name, number in (("raw", 1), ("processed", 2)):
                one, other = (np.array([entry[number] for entry in column]) for column in columns)
                apart = float(np.abs(one - other).max())
                check(apart <= self.logprob_error, f"{name} log-probs are at most {self.logprob_error} apart", apart)
            best = [[entry[3].token_ids for entry in column] for column in columns]
            equal(best[1], best[0], "alternatives of each token")

    @on_loop
    async def test_a_sequence_resumes_in_the_middle_of_a_run(self) -> None:
        async with on_bench(self.make_plain(self.limits)) as plain, on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(on.size - 3)
            wanted = await plain.answer(0, prompt, 12, _TABLES[0])
            for count in range(1, 5):
                known = prompt + wanted.tokens[:count]
                outputs = await _decode(on, count, known, _TABLES[1], 12 - count, GREEDY)
                tokens = [token for output in outputs for token in output.tokens][: 12 - count]
                equal(tokens, wanted.tokens[count:], f"tokens after a resume behind {count} tokens")
                await on.leave(count)


async def _decode(
    on: Bench, key: int, prompt: Sequence[int], blocks: Sequence[int], count: int, sampler: SamplerSpec
) -> list[StepOutput]:
    """Prefill in one step and decode until there are `count` tokens; each step has room for the longest run."""
    outputs = [await on.launch_prefill(on.start(key, prompt, blocks, sampler=sampler))]
    have, num_blocks = len(prompt), -(-len(prompt) // on.size)
    tokens = 1
    while tokens < count:
        appends = []
        while num_blocks * on.size < have + on.capacity.max_run_tokens:
            appends.append(on.append(key, blocks[num_blocks]))
            num_blocks += 1
        outputs.append(await on.launch(appends=appends))
        have += len(outputs[-1].tokens)
        tokens += len(outputs[-1].tokens)
    return outputs


async def _decode_two_at_a_time(
    on: Bench, key: int, prompt: Sequence[int], blocks: Sequence[int], count: int, sampler: SamplerSpec
) -> list[StepOutput]:
    """As `_decode`, with each step launched before the one before it has ended; each has room for the longest runs."""
    outputs: list[StepOutput] = []
    flying = [on.launch_prefill(on.start(key, prompt, blocks, sampler=sampler))]
    have, num_blocks = len(prompt), -(-len(prompt) // on.size)
    tokens = 0
    while tokens < count:
        appends = []
        while num_blocks < len(blocks) and num_blocks * on.size < have + 2 * on.capacity.max_run_tokens:
            appends.append(on.append(key, blocks[num_blocks]))
            num_blocks += 1
        flying.append(on.launch(appends=appends))
        outputs.append(await flying.pop(0))
        tokens += len(outputs[-1].tokens)
        have = len(prompt) + tokens - 1
    return outputs + [await step for step in flying]


def runs_of(output: StepOutput) -> list[list[int]]:
    """The tokens of each sequence that a step sampled for."""
    counts = (1,) * len(output.tokens) if output.counts is None else output.counts
    equal(sum(counts), len(output.tokens), f"sum of the counts {counts}, beside the number of tokens")
    stops = np.cumsum(counts, dtype=int).tolist()
    return [list(output.tokens[stop - count : stop]) for stop, count in zip(stops, counts, strict=True)]


def columns_of(output: StepOutput) -> Iterator[tuple[Any, ...]]:
    """Token, raw and processed log-prob and alternatives of each entry of a step; none may be missing."""
    assert output.raw is not None, f"raw log-probs of a sequence with log-probs: {output}"
    assert output.processed is not None, f"processed log-probs of a sequence with log-probs: {output}"
    assert output.top is not None, f"alternatives of a sequence with log-probs: {output}"
    return zip(output.tokens, output.raw, output.processed, output.top, strict=True)
