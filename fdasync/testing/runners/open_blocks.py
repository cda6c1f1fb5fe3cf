"""The part of the conformance suite for runners about sequences that another instance began.

One runner computes a prompt and its first token. The KV of all its blocks, the partly filled one included, and its rows
are moved as bytes to another runner, which goes on where the first runner stopped: in the middle of a block. Its output
must equal the first runner's when the first runner goes on itself. Used by `runners/suite.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.events.actions import Chunk
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, Answer, noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite, same_rows
from fdasync.testing.runners.lines import Line, Play

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from numpy.typing import NDArray

    from fdasync.request import SamplerSpec
    from fdasync.runner.base import CopyOutput
    from fdasync.testing.runners.bench import Bench

# sampled tokens of a sequence, the first one included
_COUNT = 6
_HOST_BLOCKS = 4
# places of blocks: in the first runner, on the second one's host, in the second one; and of other sequences there
_FROM = (0, 1, 2, 3)
_PLACES = (2, 0, 3, 1)
_INTO = (9, 4, 7, 2)
_OTHERS = ((0, 1), (5, 6, 8))


@dataclass(frozen=True)
class _Begun:
    """A sequence that one instance hands over after the first token, and its end where it stays.

    Attributes:
        prompt, sampler: of the sequence.
        kv, rows: copies of its blocks and rows after the first token.
        past: the bytes of the last block that belong to tokens behind the prompt, as far as they are known.
        line, whole: the sequence, and its answer, when the first instance goes on.
    """

    prompt: list[int]
    sampler: SamplerSpec
    kv: list[NDArray[np.uint8]]
    past: NDArray[np.bool_]
    rows: dict[str, NDArray[Any]]
    line: Line
    whole: Answer


class TailTests(RunnerSuite):
    """A sequence that is taken over anywhere in a block goes on as if it had stayed."""

    @on_loop
    async def test_a_sequence_begun_elsewhere_goes_on_in_the_middle_of_a_block(self) -> None:
        await self._goes_on_after(lambda size: 2 * size + size // 2)

    @on_loop
    async def test_a_sequence_begun_elsewhere_goes_on_after_one_token_of_a_block(self) -> None:
        await self._goes_on_after(lambda size: 2 * size + 1)

    @on_loop
    async def test_a_sequence_begun_elsewhere_goes_on_with_the_last_token_of_a_block(self) -> None:
        await self._goes_on_after(lambda size: 3 * size - 1)

    @on_loop
    async def test_a_sequence_begun_elsewhere_goes_on_in_a_fresh_block(self) -> None:
        await self._goes_on_after(lambda size: 2 * size)

    @on_loop
    async def test_a_sequence_begun_elsewhere_goes_on_in_its_only_block(self) -> None:
        await self._goes_on_after(lambda size: size // 2 + 1)

    @on_loop
    async def test_what_lies_past_the_tokens_of_a_tail_counts_for_nothing(self) -> None:
        async with self._bench() as one, self._bench() as other:
            random = np.random.default_rng(1)
            for key, tail in enumerate((1, one.size // 2, one.size - 1)):
                prompt = one.prompt(one.size + tail, salt=3)
                # so long that the tail is filled: then it shows which bytes are not the prompt's
                begun = await self._begin(one, key, prompt, self._samplers(one)[0], one.size + 2)
                written = int(begun.past.sum())
                check(
                    written,
                    f"bytes of the open block that changed while {one.size + 2} tokens were decoded behind a prompt of"
                    f" {len(prompt)} (limit: at least 1; a decode step must write its token's KV to the device block"
                    " that its sequence names, and a later SwapOut must copy that block)",
                    written,
                )
                noise = random.integers(0, 256, begun.past.shape, np.uint8)
                # bytes of 0xff alone are NaN
                for number, garbage in enumerate((np.full_like(noise, 0xFF), noise)):
                    kv = [*begun.kv[:-1], np.where(begun.past, garbage, begun.kv[-1])]
                    await self._take_over(other, 10 * key + number, replace(begun, kv=kv), 1)

    @on_loop
    async def test_a_sequence_begun_elsewhere_may_have_more_to_compute(self) -> None:
        async with self._bench() as one, self._bench() as other:
            prompt = one.prompt(2 * one.size - 3)
            begun = await self._begin(one, 0, prompt, self._samplers(one)[1], one.size + 2)
            kv = [*begun.kv[:-1], np.where(begun.past, np.uint8(0xFF), begun.kv[-1])]
            await self._receive(other, replace(begun, kv=kv))
            # two chunks: the first one ends in the tail, the second one in the block behind it
            known, blocks = prompt + begun.line.tokens[:5], _INTO[:3]
            start = other.start(0, known, blocks, cached=len(prompt), prompt_len=len(prompt), sampler=begun.sampler)
            sampled = await other.step(starts=[start], chunks=[Chunk(0, 2, False)])
            equal(sampled, (), "tokens of a chunk that is not a sequence's last")
            tokens = known[len(prompt) :] + list(await other.step(chunks=[Chunk(0, 3, True)]))
            tokens += await other.decode(0, len(known), blocks, len(begun.line.tokens) - 6)
            self.assert_same(begun.whole, Answer(tokens, other.rows(blocks, 0, len(prompt) + len(tokens) - 1)))

    @on_loop
    async def test_a_tail_that_was_swapped_goes_on_in_its_slot(self) -> None:
        for capture in (self.limits.capture, False):
            limits = msgspec.structs.replace(self.limits, capture=capture)
            async with on_bench(self.make(limits), host_blocks=_HOST_BLOCKS) as on:
                size = on.size
                prompt = on.prompt(2 * size + 5)
                plain = await on.answer(0, prompt, size, _FROM)
                first = await on.launch_prefill(on.start(1, prompt, _FROM))
                await on.swap_out(_FROM[:3], _PLACES[:3])
                await on.leave(1)
                await on.answer(2, on.prompt(3 * size, salt=1), 1, _FROM)
                await on.swap_in(_PLACES[:3], _INTO[:3])
                before = on.rows(_INTO, 0, len(prompt))
                known = prompt + list(first.tokens)
                start = on.start(3, known, _INTO, cached=len(prompt), prompt_len=len(prompt))
                tokens = list((await on.launch_prefill(start)).tokens)
                tokens += await on.decode(3, len(known), _INTO, size - 2)
                rows = on.rows(_INTO, 0, len(prompt) + size - 1)
                self.assert_same(plain, Answer([*first.tokens, *tokens], rows))
                _assert_untouched(before, rows)

    # -- tools ---------------------------------------------------------------------------------------

    def _bench(self) -> AbstractAsyncContextManager[Bench]:
        return on_bench(self.make(self.limits), host_blocks=_HOST_BLOCKS)

    def _samplers(self, on: Bench) -> tuple[SamplerSpec, SamplerSpec]:
        """Greedy, and one with every option that depends on the tokens of the output and their number."""
        logprobs = {"raw": True, "processed": True, "top": 3} if self.logprobs else {}
        penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}
        # until four were sampled, half of the vocabulary is out of reach
        stops = {"min_tokens": 4, "stop_ids": tuple(range(on.capacity.vocab_size // 2))}
        greedy = msgspec.structs.replace(GREEDY, **logprobs)
        return greedy, msgspec.structs.replace(noisy(7, 1), **logprobs, **penalties, **stops)

    async def _goes_on_after(self, length_of: Callable[[int], int]) -> None:
        async with self._bench() as one, self._bench() as other:
            prompt = one.prompt(length_of(one.size), salt=2)
            key = 0
            for sampler in self._samplers(one):
                begun = await self._begin(one, key, prompt, sampler, _COUNT)
                for depth in (1, 2) if self.overlaps else (1,):
                    await self._take_over(other, key, begun, depth)
                    key += 10

    async def _begin(self, on: Bench, key: int, prompt: list[int], sampler: SamplerSpec, count: int) -> _Begun:
        """Compute a sequence, with copies of its whole blocks as they were after its first token."""
        line = Line(on.start(key, prompt, _FROM, sampler=sampler), _FROM)
        used = len(line.start.blocks)
        play = Play(on, 1)
        await play.step(line)
        kv = await self._sent(on, _FROM[:used])
        rows = on.rows(_FROM, 0, len(prompt))
        for _ in range(count - 1):
            await play.step()
        past = kv[-1] != (await self._sent(on, _FROM[used - 1 : used]))[0]
        await play.end()
        whole = Answer(line.tokens, on.rows(_FROM, 0, len(prompt) + count - 1))
        return _Begun(prompt, sampler, kv, past, rows, line, whole)

    async def _sent(self, on: Bench, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        await on.swap_out(blocks, _PLACES[: len(blocks)])
        assert on.host is not None, f"the bench has no host tier: {on.host}"
        return [on.host.kv[place].copy() for place in _PLACES[: len(blocks)]]

    def _receive(self, on: Bench, begun: _Begun) -> asyncio.Future[CopyOutput]:
        places = _PLACES[: len(begun.kv)]
        on.receive(begun.kv, begun.rows, len(begun.prompt), places)
        return on.swap_in(places, _INTO[: len(places)])

    async def _take_over(self, on: Bench, key: int, begun: _Begun, depth: int) -> None:
        """Go on with a sequence beside others, which join before it and with it; all must answer as they do alone."""
        prompts = [on.prompt(5), on.prompt(on.size + 3, salt=5)] if self.batch_safe else []
        alone = [await on.answer(key + 1, prompt, _COUNT, _OTHERS[at]) for at, prompt in enumerate(prompts)]
        prompt, first = begun.prompt, begun.line.tokens[0]
        play = Play(on, depth)
        others = [Line(on.start(key + 1 + at, own, _OTHERS[at]), _OTHERS[at]) for at, own in enumerate(prompts)]
        await play.step(*others[:1])
        # its blocks arrive while another sequence runs
        arrived = self._receive(on, begun)
        await play.step()
        await arrived
        here: dict[str, Any] = {"cached": len(prompt), "prompt_len": len(prompt), "sampler": begun.sampler}
        line = Line(on.start(key, [*prompt, first], _INTO, **here), _INTO)
        await play.step(line, *others[1:])
        for _ in range(len(begun.line.tokens) - 2):
            await play.step()
        await play.end()
        num_rows = len(prompt) + len(line.tokens)
        rows = on.rows(_INTO, 0, num_rows)
        self.assert_same(begun.whole, Answer([first, *line.tokens], rows))
        _assert_untouched(begun.rows, rows)
        self._assert_logprobs(begun.line, line)
        for at, other in enumerate(others):
            beside = alone[at].tokens[: len(other.tokens)]
            equal(other.tokens[:_COUNT], beside, "tokens of another sequence, beside one from elsewhere")
        self._assert_no_row(on, num_rows)

    def _assert_no_row(self, on: Bench, position: int) -> None:
        """Raise AssertionError if a row is there behind the last row of an open block."""
        if on.arena is None or not position % on.size:
            return
        try:
            on.rows(_INTO, position, position + 1)
        except InvariantBroken:
            return
        raise AssertionError(f"row {position} is there, which no step computed")

    def _assert_logprobs(self, whole: Line, later: Line) -> None:
        """Compare log-probs from the second token on; the first token came with its log-probs."""
        if not self.logprobs:
            return
        for name in ("raw", "processed", "best"):
            one, other = np.array(getattr(whole, name)[1:]), np.array(getattr(later, name))
            equal(other.shape, one.shape, f"shape of {name} log-probs after a sequence came from elsewhere")
            check(one.size, f"number of {name} log-probs of a sequence that asks for them", one.size)
            apart = float(np.abs(one - other).max())
            check(apart <= self.logprob_error, f"{name} log-probs are at most {self.logprob_error} apart", apart)


def _assert_untouched(before: dict[str, NDArray[Any]], after: dict[str, NDArray[Any]]) -> None:
    for name, rows in before.items():
        same_rows(after[name][: len(rows)], rows, f"rows of {name} that came with the KV, and stay")
