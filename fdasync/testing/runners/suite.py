"""The conformance suite for runners: what `runner/base.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyRunner(RunnerTests):
        def make(self, limits):
            return MyRunner(MyConfig(...), limits)

The tests are plain functions that run a loop of their own, so they need no plugin and no settings. Numeric runners may
loosen `assert_same`. This file tests steps; copies of blocks, sequences that another instance began, new weights, logit
bias and log-probs of prompts, grammars, fixed numerics, and positions that indexers chose are in `copies.py`,
`open_blocks.py`, `weights.py`, `scores.py`, `grammars.py`, `numerics.py` and `positions.py`. Knows the contract only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import Chunk
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, Answer, noisy, on_bench
from fdasync.testing.runners.copies import CopyTests
from fdasync.testing.runners.grammars import GrammarTests
from fdasync.testing.runners.harness import is_runner_error
from fdasync.testing.runners.numerics import NumericsTests
from fdasync.testing.runners.open_blocks import TailTests
from fdasync.testing.runners.positions import PositionTests
from fdasync.testing.runners.scores import ScoreTests
from fdasync.testing.runners.weights import WeightsTests

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.runner.base import StepOutput

# bounds hangs alone: busy machines are slow
_LIMIT_S = 120.0


class RunnerTests(CopyTests, GrammarTests, NumericsTests, PositionTests, ScoreTests, TailTests, WeightsTests):
    """Subclass it, name the subclass Test..., define `make`; more in `RunnerSuite`."""

    # -- what it is -----------------------------------------------------------------------------------

    @on_loop
    async def test_capacity_makes_sense(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            capacity = on.capacity
            size = capacity.block_tokens
            check(size & (size - 1) == 0, "block_tokens is a power of two", size)
            check(capacity.num_blocks >= 12, "num_blocks is 12 at least", capacity.num_blocks)
            context = capacity.max_context_tokens
            check(context >= 4 * size, f"max_context_tokens is 4 blocks of {size} at least", context)
            check(capacity.fingerprint, "a capacity has a fingerprint", capacity.fingerprint)
            check(capacity.weights_id, "a capacity has a weights id", capacity.weights_id)
            eos_ids, vocab = capacity.eos_ids, capacity.vocab_size
            check(all(0 <= token < vocab for token in eos_ids), f"EOS ids are in the vocabulary of {vocab}", eos_ids)
            for spec in capacity.aux_specs:
                nbytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape))
                equal(nbytes, spec.token_nbytes, f"bytes of a row of {spec}")
                if spec.name == "routing":
                    equal(spec.shape, (len(capacity.moe_layer_ids), capacity.top_k), "shape of a row of routing")

    @on_loop
    async def test_two_of_them_answer_alike(self) -> None:
        async with on_bench(self.make(self.limits)) as one, on_bench(self.make(self.limits)) as other:
            # measured rates differ from one start to the next
            capacities = [msgspec.structs.replace(on.capacity, prefill_tokens_per_s=0.0) for on in (one, other)]
            equal(capacities[1], capacities[0], "capacity of a second runner of the same configuration")
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
            # the same tokens over another prompt's KV must differ, since that KV is read
            await on.answer(2, on.prompt(2 * size + 1, salt=1), 1, [6, 7, 8])
            astray = await on.answer(3, prompt, 4, [6, 7, 9], cached=2 * size)
            tail = {name: rows[2 * size :] for name, rows in plain.rows.items() if name != "stamp"}
            moved = [not np.array_equal(rows, astray.rows[name][2 * size :]) for name, rows in tail.items()]
            moved_any = astray.tokens != plain.tokens or any(moved)
            check(moved_any, "tokens and rows over another prompt's cached blocks, which are to be read", astray.tokens)

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
                    experts = on.capacity.num_experts
                    check(int(found.max()) < experts, f"expert ids are below {experts}", int(found.max()))
            equal({len(part) for part in rows.values()}, {len(prompt)}, f"rows of {len(prompt)} positions")
            into = {spec.name: np.empty((1, *spec.shape), spec.dtype) for spec in on.arena.specs}
            never = [(on.slot(8), on.generation(8), 3), (on.slot(3), on.generation(3) + 1, 0), (on.slot(5), 1, 0)]
            for slot, generation, offset in never:
                try:
                    on.arena.copy_rows((slot,), (generation,), offset, 1, into, 0)
                except InvariantBroken:
                    continue
                raise AssertionError(f"row {offset} of slot {slot} generation {generation} was never computed")
            # a new use of the same blocks writes under the new generation
            await on.leave(0)
            await on.launch_prefill(on.start(1, on.prompt(4, salt=1), [8]))
            equal(on.generation(8), 2, "generation of a block's second use")
            on.rows([8], 0, 4)

    @on_loop
    async def test_a_step_writes_every_spec_of_every_row(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.arena is None:
                return
            prompt = on.prompt(on.size + 3)
            found: list[dict[str, NDArray[np.uint8]]] = []
            # a byte that keeps both fills was not written
            for key, fill in enumerate((0x00, 0xFF)):
                on.fill_rows(fill)
                try:
                    answer = await on.answer(key, prompt, 3, [3, 8])
                except (RunnerError, InvariantBroken) as error:
                    raise AssertionError(f"a step whose rows must be those of the specs ended with: {error}") from error
                found.append({name: np.ascontiguousarray(rows).view(np.uint8) for name, rows in answer.rows.items()})
            for spec in on.capacity.aux_specs:
                left = (found[0][spec.name] == 0x00) & (found[1][spec.name] == 0xFF)
                assert not left.any(), f"{int(left.sum())} bytes of {spec.name!r} rows were never written by the step"

    @on_loop
    async def test_capture_off_answers_the_same(self) -> None:
        limits = msgspec.structs.replace(self.limits, capture=False)
        async with on_bench(self.make(self.limits)) as on, on_bench(self.make(limits)) as off:
            names = [spec.name for spec in off.capacity.aux_specs]
            check("routing" not in names, "aux specs without capture", names)
            prompt = on.prompt(on.size + 3)
            tokens = (await on.answer(0, prompt, 5, [0, 1])).tokens
            equal((await off.answer(0, prompt, 5, [0, 1])).tokens, tokens, "tokens without capture")

    # -- what a step is -------------------------------------------------------------------------------

    @on_loop
    async def test_chunks_add_up(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(2 * on.size + 5)
            plain = await on.answer(0, prompt, 3, [0, 1, 2])
            blocks = [5, 4, 3]
            cuts = [3, on.size, len(prompt) - on.size - 3]
            first = await on.step(starts=[on.start(1, prompt, blocks)], chunks=[Chunk(1, cuts[0], False)])
            equal(first, (), "tokens of a prompt's first chunk of three")
            equal(await on.step(chunks=[Chunk(1, cuts[1], False)]), (), "tokens of a prompt's second chunk of three")
            tokens = list(await on.step(chunks=[Chunk(1, cuts[2], True)]))
            tokens += await on.decode(1, len(prompt), blocks, 2)
            self.assert_same(plain, Answer(tokens, on.rows(blocks, 0, len(prompt) + 2)))

    @on_loop
    async def test_a_batch_changes_no_sequence(self) -> None:
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
            equal(list(first), [alone[0][0], alone[1][0]], "first tokens of two sequences in one step")
            # 10 leaves, 11 sits out, 12 comes into the lane and the block that 10 had
            start = on.start(12, prompts[2], [0])
            joined = await on.step(leaves=[10], starts=[start], skips=[11], chunks=[Chunk(12, 5, True)])
            equal(list(joined), [alone[2][0]], "tokens where one leaves, one sits out and one comes")
            equal(list(await on.step()), [alone[1][1], alone[2][1]], "tokens of two, in the order in which they joined")
            equal(list(await on.step(skips=[12])), [alone[1][2]], "tokens where the second of two sits out")
            equal(list(await on.step()), [alone[1][3], alone[2][2]], "tokens of two, one of which sat out")

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
                equal(again, tokens[4:], f"tokens after a resume, at temperature {sampler.temperature:g}")

    @on_loop
    async def test_noise_is_of_seed_index_and_position_alone(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(6)
            samplers = [noisy(1, 0), noisy(1, 1), noisy(2, 0)]
            alone = [(await on.answer(key, prompt, 6, [key], sampler=samplers[key])).tokens for key in range(3)]
            check(alone[0] != alone[1], "tokens of samples 0 and 1, which must differ", alone[:2])
            check(alone[0] != alone[2], "tokens under seeds 1 and 2, which must differ", alone[::2])
            # backwards, in one batch, under other keys and in other blocks
            order = [2, 1, 0]
            starts = [on.start(20 + key, prompt, [5 + key], sampler=samplers[key]) for key in order]
            steps = [(await on.launch_prefill(*starts)).tokens]
            steps += [await on.step() for _ in range(5)]
            for place, key in enumerate(order):
                equal([step[place] for step in steps], alone[key], "tokens in a batch, of a seed, sample and position")

    @on_loop
    async def test_log_probs_where_they_are_wanted(self) -> None:
        if not self.logprobs:
            return
        async with on_bench(self.make(self.limits)) as on:
            wants = msgspec.structs.replace(GREEDY, raw=True, processed=True, top=3)
            starts = [on.start(0, on.prompt(4), [0]), on.start(1, on.prompt(5), [1], sampler=wants)]
            output = await on.launch_prefill(*starts)
            assert output.raw is not None, f"raw log-probs of a step where a sequence wants them: {output}"
            assert output.processed is not None, f"processed log-probs of a step where a sequence wants them: {output}"
            assert output.top is not None, f"alternatives of a step where a sequence wants them: {output}"
            best = output.top[1]
            assert best is not None, f"alternatives of the sequence that wants them: {output.top}"
            equal(best.token_ids[0], output.tokens[1], "the likeliest alternative, beside what greedy sampled")
            check(abs(best.logprobs[0] - output.raw[1]) < 1e-5, f"its log-prob, of {output.raw[1]}", best.logprobs[0])
            equal(list(best.logprobs), sorted(best.logprobs, reverse=True), "log-probs of alternatives, best first")
            check(output.raw[1] <= 0.0, "a log-prob is not above 0", output.raw[1])
            equal((await on.launch(skips=[1])).raw, None, "raw log-probs of a step where no sequence wants them")

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
                # the token of the last step has not come back: the runner feeds it on
                due = len(prompt) + number == on.size
                futures.append(on.launch(appends=[on.append(1, 3)] if due else []))
                futures[-2].add_done_callback(lambda done: ended.append(done.result().step_id))
                if number:
                    await futures[number - 1]
            outputs: list[StepOutput] = [await future for future in futures]
            equal([output.tokens[0] for output in outputs], tokens, "tokens of steps that overlap")
            equal(ended, sorted(ended), "order in which steps that overlap ended")
            ids = [output.step_id for output in outputs]
            equal(ids, sorted(ids), "ids of the outputs of steps in order of launch")

    @on_loop
    async def test_cancelling_stops_the_waiting_not_the_work(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            prompt = on.prompt(5)
            tokens = (await on.answer(0, prompt, 2, [0])).tokens
            on.launch_prefill(on.start(1, prompt, [1])).cancel()
            equal(list(await on.step()), tokens[1:], "tokens of the step after one whose wait was cancelled")
            on.rows([1], 0, 6)

    @on_loop
    async def test_a_step_that_makes_no_sense_fails(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            failed = on.launch(leaves=[99])
            await asyncio.wait([failed])
            is_runner_error(failed, "a step in which a sequence leaves that never came")

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
            equal(ended, ["good", "bad"], "order in which a good step and a bad one behind it ended")
            equal(good.exception(), None, "what a good step before a bad one raises")
            is_runner_error(bad, "a step in which a sequence leaves that never came")

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
            await asyncio.wait([pending], timeout=_LIMIT_S)
            check(pending.done(), f"a step in flight ends within {_LIMIT_S:g} s of aclose", pending)
            _ = pending.cancelled() or pending.exception()
