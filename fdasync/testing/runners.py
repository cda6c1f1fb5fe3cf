"""The conformance suite for runners: what `runner/base.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyRunner(RunnerTests):
        def make(self, limits):
            return MyRunner(MyConfig(...), limits)

The tests are plain functions that run a loop of their own, so they need no plugin and no settings. Knows
nothing but the contract; numeric runners may loosen `assert_same`. Here are steps; copies of blocks,
sequences that another instance began and new weights are in `runner_copies.py`, `runner_tails.py` and
`runner_weights.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.actions import Chunk
from fdasync.errors import InvariantBroken, RunnerError
from fdasync.testing.bench import GREEDY, Answer, noisy, on_bench
from fdasync.testing.runner_copies import CopyTests
from fdasync.testing.runner_suite import on_loop
from fdasync.testing.runner_tails import TailTests
from fdasync.testing.runner_weights import WeightsTests

if TYPE_CHECKING:
    from fdasync.runner.base import StepOutput


class RunnerTests(CopyTests, TailTests, WeightsTests):
    """Subclass it, name the subclass Test..., define `make`; more in `RunnerSuite`."""

    # -- what it is -----------------------------------------------------------------------------------

    @on_loop
    async def test_capacity_makes_sense(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            capacity = on.capacity
            assert capacity.block_tokens & (capacity.block_tokens - 1) == 0
            assert capacity.num_blocks >= 12
            assert capacity.max_context_tokens >= 4 * capacity.block_tokens
            assert capacity.fingerprint
            assert capacity.weights_id
            assert all(0 <= token < capacity.vocab_size for token in capacity.eos_ids)
            for spec in capacity.aux_specs:
                assert np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape)) == spec.token_nbytes
                if spec.name == "routing":
                    assert spec.shape == (len(capacity.moe_layer_ids), capacity.top_k)

    @on_loop
    async def test_two_of_them_answer_alike(self) -> None:
        async with on_bench(self.make(self.limits)) as one, on_bench(self.make(self.limits)) as other:
            # what was measured differs from one start to the next
            capacities = [msgspec.structs.replace(on.capacity, prefill_tokens_per_s=0.0) for on in (one, other)]
            assert capacities[0] == capacities[1]
            prompt = one.prompt(one.size + 3)
            first = await one.answer(0, prompt, 4, [0, 1])
            self.assert_same(first, await other.answer(0, prompt, 4, [0, 1]))

    # -- blocks and rows ------------------------------------------------------------------------------

    @on_loop
    async def test_block_table_is_honoured(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(2 * on.size + 3)
            plain = await on.answer(0, prompt, on.size, [0, 1, 2, 3])
            self.assert_same(plain, await on.answer(1, prompt, on.size, [9, 4, 11, 6]))

    @on_loop
    async def test_cached_blocks_are_read_not_computed(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            size = on.size
            prompt = on.prompt(2 * size + 3)
            plain = await on.answer(0, prompt, 4, [0, 1, 2])
            self.assert_same(plain, await on.answer(1, prompt, 4, [0, 1, 5], cached=2 * size))
            # the same tokens on top of another prompt's KV must not give the same: it is read
            await on.answer(2, on.prompt(2 * size + 1, salt=1), 1, [6, 7, 8])
            astray = await on.answer(3, prompt, 4, [6, 7, 9], cached=2 * size)
            tail = {name: rows[2 * size :] for name, rows in plain.rows.items() if name != "stamp"}
            moved = [not np.array_equal(rows, astray.rows[name][2 * size :]) for name, rows in tail.items()]
            assert astray.tokens != plain.tokens or any(moved), "the cached blocks were not read"

    @on_loop
    async def test_rows_are_there_at_completion_under_their_generation(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.arena is None:
                return
            prompt = on.prompt(on.size + 3)
            await on.launch_prefill(on.start(0, prompt, [3, 8]))
            rows = on.rows([3, 8], 0, len(prompt))
            for name, found in on.arena.rows.items():
                if name == "routing":
                    assert int(found.max()) < on.capacity.num_experts
            assert {len(part) for part in rows.values()} == {len(prompt)}
            into = {spec.name: np.empty((1, *spec.shape), spec.dtype) for spec in on.arena.specs}
            never = [(on.slot(8), on.generation(8), 3), (on.slot(3), on.generation(3) + 1, 0), (on.slot(5), 1, 0)]
            for slot, generation, offset in never:
                try:
                    on.arena.copy_rows(slot, generation, offset, 1, into, 0)
                except InvariantBroken:
                    continue
                raise AssertionError(f"row {offset} of slot {slot} generation {generation} was never computed")
            # a new use of the same blocks writes under the new generation
            await on.leave(0)
            await on.launch_prefill(on.start(1, on.prompt(4, salt=1), [8]))
            assert on.generation(8) == 2
            on.rows([8], 0, 4)

    @on_loop
    async def test_capture_off_answers_the_same(self) -> None:
        limits = msgspec.structs.replace(self.limits, capture=False)
        async with on_bench(self.make(self.limits)) as on, on_bench(self.make(limits), capture=False) as off:
            assert off.capacity.aux_specs == ()
            prompt = on.prompt(on.size + 3)
            tokens = (await on.answer(0, prompt, 5, [0, 1])).tokens
            assert (await off.answer(0, prompt, 5, [0, 1])).tokens == tokens

    # -- what a step is -------------------------------------------------------------------------------

    @on_loop
    async def test_chunks_add_up(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(2 * on.size + 5)
            plain = await on.answer(0, prompt, 3, [0, 1, 2])
            blocks = [5, 4, 3]
            cuts = [3, on.size, len(prompt) - on.size - 3]
            assert await on.step(starts=[on.start(1, prompt, blocks)], chunks=[Chunk(1, cuts[0], False)]) == ()
            assert await on.step(chunks=[Chunk(1, cuts[1], False)]) == ()
            tokens = list(await on.step(chunks=[Chunk(1, cuts[2], True)]))
            tokens += await on.decode(1, len(prompt), blocks, 2)
            self.assert_same(plain, Answer(tokens, on.rows(blocks, 0, len(prompt) + 2)))

    @on_loop
    async def test_a_batch_changes_nobody(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompts = [on.prompt(length, salt=7) for length in (3, on.size, on.size + 5)]
            tables = [[0, 1], [2, 3], [4, 5]]
            alone = [await on.answer(key, prompts[key], 3, tables[key]) for key in range(3)]
            starts = [on.start(10 + key, prompts[key], tables[key]) for key in range(3)]
            steps = [(await on.launch_prefill(*starts)).tokens]
            for number in range(2):
                lengths = [len(prompt) + number for prompt in prompts]
                due = [key for key in range(3) if lengths[key] % on.size == 0]
                appends = [on.append(10 + key, tables[key][lengths[key] // on.size]) for key in due]
                steps.append(await on.step(appends=appends))
            for key in range(3):
                rows = on.rows(tables[key], 0, len(prompts[key]) + 2)
                self.assert_same(alone[key], Answer([step[key] for step in steps], rows))

    @on_loop
    async def test_leaves_starts_skips_and_chunks_in_one_step(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompts = [on.prompt(5, salt=salt) for salt in range(3)]
            alone = [(await on.answer(key, prompts[key], 4, [key])).tokens for key in range(3)]
            first = (await on.launch_prefill(*[on.start(10 + key, prompts[key], [key]) for key in range(2)])).tokens
            assert list(first) == [alone[0][0], alone[1][0]]
            # 10 leaves, 11 sits out, 12 comes into the lane and the block that 10 had
            start = on.start(12, prompts[2], [0])
            joined = await on.step(leaves=[10], starts=[start], skips=[11], chunks=[Chunk(12, 5, True)])
            assert list(joined) == [alone[2][0]]
            assert list(await on.step()) == [alone[1][1], alone[2][1]], "order of joining"
            assert list(await on.step(skips=[12])) == [alone[1][2]]
            assert list(await on.step()) == [alone[1][3], alone[2][2]]

    @on_loop
    async def test_resuming_gives_what_would_have_come(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(on.size - 2)
            for sampler in (GREEDY, noisy(5)):
                tokens = (await on.answer(0, prompt, 8, [0, 1], sampler=sampler)).tokens
                known = prompt + tokens[:4]
                start = on.start(1, known, [4, 3], prompt_len=len(prompt), sampler=sampler)
                again = list((await on.launch_prefill(start)).tokens)
                again += await on.decode(1, len(known), [4, 3], 3)
                await on.leave(1)
                assert again == tokens[4:]

    @on_loop
    async def test_noise_is_of_seed_index_and_position_alone(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(6)
            samplers = [noisy(1, 0), noisy(1, 1), noisy(2, 0)]
            alone = [(await on.answer(key, prompt, 6, [key], sampler=samplers[key])).tokens for key in range(3)]
            assert alone[0] != alone[1]
            assert alone[0] != alone[2]
            # backwards, in one batch, under other keys and in other blocks
            order = [2, 1, 0]
            starts = [on.start(20 + key, prompt, [5 + key], sampler=samplers[key]) for key in order]
            steps = [(await on.launch_prefill(*starts)).tokens]
            steps += [await on.step() for _ in range(5)]
            for place, key in enumerate(order):
                assert [step[place] for step in steps] == alone[key]

    @on_loop
    async def test_logprobs_of_those_who_ask(self) -> None:
        if not self.logprobs:
            return
        async with on_bench(self.make(self.limits)) as on:
            asks = msgspec.structs.replace(GREEDY, raw=True, processed=True, top=3)
            starts = [on.start(0, on.prompt(4), [0]), on.start(1, on.prompt(5), [1], sampler=asks)]
            output = await on.launch_prefill(*starts)
            assert output.raw is not None
            assert output.processed is not None
            assert output.top is not None
            best = output.top[1]
            assert best is not None
            assert best.token_ids[0] == output.tokens[1], "greedy takes the likeliest"
            assert abs(best.logprobs[0] - output.raw[1]) < 1e-5
            assert list(best.logprobs) == sorted(best.logprobs, reverse=True)
            assert output.raw[1] <= 0.0
            assert (await on.launch(skips=[1])).raw is None, "nobody who sampled asked"

    # -- in flight, and ends --------------------------------------------------------------------------

    @on_loop
    async def test_steps_overlap_and_complete_in_order(self) -> None:
        if not self.overlaps:
            return
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(on.size - 2)
            tokens = (await on.answer(0, prompt, 4, [0, 1])).tokens
            ended: list[int] = []
            futures = [on.launch_prefill(on.start(1, prompt, [2]))]
            for number in range(3):
                # the token of the step before has not come back: the runner feeds it on
                due = len(prompt) + number == on.size
                futures.append(on.launch(appends=[on.append(1, 3)] if due else []))
                futures[-2].add_done_callback(lambda done: ended.append(done.result().step_id))
                if number:
                    await futures[number - 1]
            outputs: list[StepOutput] = [await future for future in futures]
            assert [output.tokens[0] for output in outputs] == tokens
            assert ended == sorted(ended)
            assert [output.step_id for output in outputs] == sorted(output.step_id for output in outputs)

    @on_loop
    async def test_cancelling_stops_the_waiting_not_the_work(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(5)
            tokens = (await on.answer(0, prompt, 2, [0])).tokens
            on.launch_prefill(on.start(1, prompt, [1])).cancel()
            assert list(await on.step()) == tokens[1:]
            on.rows([1], 0, 6)

    @on_loop
    async def test_a_step_that_makes_no_sense_fails(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            failed = on.launch(leaves=[99])
            await asyncio.wait([failed])
            error = failed.exception()
            assert isinstance(error, RunnerError), "a sequence left that never came, and the step ended well"
            assert error.problem

    @on_loop
    async def test_a_step_fails_after_those_before_it(self) -> None:
        if not self.overlaps:
            return
        async with on_bench(self.make(self.limits)) as on:
            ended: list[str] = []
            good = on.launch_prefill(on.start(0, on.prompt(5), [0]))
            bad = on.launch(leaves=[99])
            good.add_done_callback(lambda _: ended.append("good"))
            bad.add_done_callback(lambda _: ended.append("bad"))
            await asyncio.wait([good, bad])
            assert ended == ["good", "bad"]
            assert good.exception() is None
            assert isinstance(bad.exception(), RunnerError)

    @on_loop
    async def test_aclose_at_any_time(self) -> None:
        await self.make(self.limits).aclose()
        opened = self.make(self.limits)
        await opened.open()
        await opened.aclose()
        async with on_bench(self.make(self.limits)) as on:
            # with a step in flight
            pending = on.launch_prefill(on.start(0, on.prompt(5), [0]))
            await on.runner.aclose()
            await on.runner.aclose()
            await asyncio.wait([pending], timeout=1.0)
            assert pending.done(), "a step was left without an end"
            _ = pending.cancelled() or pending.exception()
