"""Conformance of runners that answer `numerics="fixed"`: a token's numbers have the same bits however it is computed.

A sequence is computed alone, and then in batches, in odd chunks, behind cached blocks, after a preemption, after swaps
and by another runner. Tokens, log-probs and rows are compared bit by bit: `assert_same` and `logprob_error` of an
adopter count for nothing here. Runners that do not answer "fixed" when they are asked for it are skipped. Knows the
contract only. Mixed into `RunnerTests`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import ConfigError
from fdasync.events.actions import Chunk
from fdasync.testing.harness.bounded import on_loop, skip
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import noisy, on_bench
from fdasync.testing.runners.harness import RunnerSuite, same_rows
from fdasync.testing.runners.lines import Line, Play
from fdasync.testing.runners.scores import parts, scored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from fdasync.request import SamplerSpec
    from fdasync.runner.base import PromptScores
    from fdasync.testing.runners.bench import Bench

_BLOCKS = (0, 1, 2, 3)
# of three other sequences of a batch
_OTHERS = ((4, 5, 6), (7, 8, 9), (10, 11))


@dataclass(frozen=True)
class _Plain:
    """A sequence that was computed alone, its prompt in one step.

    Attributes:
        prompt, sampler: of the sequence.
        line: what was sampled: as many tokens as a block has.
        rows: of all positions that were computed, by spec name.
    """

    prompt: list[int]
    sampler: SamplerSpec
    line: Line
    rows: dict[str, NDArray[Any]]


class NumericsTests(RunnerSuite):
    """See the module."""

    @on_loop
    async def test_fixed_numbers_are_the_same_in_batches(self) -> None:
        async with self._fixed() as on:
            plain = await self._alone(on)
            await self._in_a_batch(on, plain, 1, early=False)
            await self._in_a_batch(on, plain, 2 if self.overlaps else 1, early=True)

    @on_loop
    async def test_fixed_numbers_are_the_same_in_chunks_and_behind_hits(self) -> None:
        async with self._fixed() as on:
            plain = await self._alone(on)
            await self._in_chunks(on, plain, (4, 5, 6, 7))
            await self._behind_hit(on, plain, (4, 10, 11, 8), on.size, "behind a block of an odd chunk")
            await self._behind_hit(on, plain, (0, 1, 10, 11), 2 * on.size, "behind two blocks")

    @on_loop
    async def test_fixed_numbers_are_the_same_after_a_preemption(self) -> None:
        async with self._fixed() as on:
            plain = await self._alone(on)
            for count in (1, on.size // 2):
                way = f"whose first {count} tokens were computed again"
                await self._behind_hit(on, plain, (7, 4, 9, 6), 0, way, count)
            # the third block has tokens that were decoded, the others' were prefilled
            await self._behind_hit(on, plain, (0, 1, 2, 5), 3 * on.size, "behind decoded tokens", on.size - 1)

    @on_loop
    async def test_fixed_numbers_are_the_same_after_swaps_and_elsewhere(self) -> None:
        async with self._fixed(host_blocks=4) as on, self._fixed(host_blocks=4) as other:
            size = on.size
            plain = await self._alone(on)
            await on.swap_out((0, 1, 2), (3, 0, 1))
            assert on.host is not None, f"the bench has no host tier: {on.host}"
            kv = [on.host.kv[place].copy() for place in (3, 0)]
            await on.answer(2, on.prompt(3 * size, salt=1), 1, (0, 1, 2))
            await on.swap_in((3, 0, 1), (7, 5, 9))
            await self._behind_hit(on, plain, (7, 5, 10, 11), 2 * size, "behind two blocks that were swapped")
            await self._behind_hit(on, plain, (7, 5, 9, 8), 3 * size, "behind three such blocks", size - 1)
            other.receive(kv, plain.rows, 2 * size, (1, 2))
            await other.swap_in((1, 2), (6, 3))
            await self._behind_hit(other, plain, (6, 3, 10, 1), 2 * size, "behind two blocks of another runner")

    @on_loop
    async def test_fixed_scores_are_the_log_probs_of_samples(self) -> None:
        async with self._fixed() as on:
            if not (on.capacity.scores_prompts and self.logprobs):
                skip("the runner scores no prompts, or has no log-probs")
            plain = await self._alone(on)
            longer = plain.prompt + plain.line.tokens
            whole = await self._scores(on, longer, (4, 5, 6, 7), scored(0), [len(longer)])
            sampled = whole[len(plain.prompt) - 1 :]
            _same_bits(sampled, plain.line.raw, "log-probs of sampled tokens, scored as a prompt's")
            again = await self._scores(on, longer, (9, 8, 5, 4), scored(0), [3, on.size, len(longer) - on.size - 3])
            _same_bits(again, whole, "log-probs of a prompt in three chunks, beside one")
            behind = scored(len(plain.prompt))
            again = await self._scores(on, longer, (0, 1, 2, 11), behind, [len(longer) - 2 * on.size], 2 * on.size)
            _same_bits(again, sampled, "log-probs of a prompt behind cached blocks")

    # -- tools ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _fixed(self, host_blocks: int = 0) -> AsyncIterator[Bench]:
        """A bench of a runner that answers "fixed"; the test is skipped where it does not."""
        limits = msgspec.structs.replace(self.limits, numerics="fixed")
        try:
            async with on_bench(self.make(limits), host_blocks=host_blocks) as on:
                if on.capacity.numerics != "fixed":
                    skip(f"asked for fixed numerics, the runner promises {on.capacity.numerics!r}")
                yield on
        except ConfigError as error:
            if "numerics" not in error.field:
                raise
            skip(f"asked for fixed numerics, the runner refuses: {error}")

    async def _alone(self, on: Bench) -> _Plain:
        # at a temperature, so that one bit of a logit can change a token
        sampler = msgspec.structs.replace(noisy(3), temperature=0.8)
        if self.logprobs:
            sampler = msgspec.structs.replace(sampler, raw=True, processed=True, top=3)
        prompt = on.prompt(2 * on.size + 3)
        line = Line(on.start(0, prompt, _BLOCKS, sampler=sampler), _BLOCKS)
        play = Play(on, 1)
        await play.step(line)
        await _finish(play, on.size - 1)
        return _Plain(prompt, sampler, line, on.rows(_BLOCKS, 0, len(prompt) + on.size - 1))

    async def _in_a_batch(self, on: Bench, plain: _Plain, depth: int, *, early: bool) -> None:
        """Beside three sequences of other lengths: it joins before all of them, or (not `early`) after the first."""
        line = Line(on.start(20, plain.prompt, _BLOCKS, sampler=plain.sampler), _BLOCKS)
        prompts = [on.prompt(5, salt=4), on.prompt(on.size + 1, salt=5), on.prompt(3, salt=6)]
        starts = [on.start(21 + at, prompt, _OTHERS[at], sampler=noisy(at)) for at, prompt in enumerate(prompts)]
        others = [Line(start, blocks) for start, blocks in zip(starts, _OTHERS, strict=True)]
        play = Play(on, depth)
        for lines in ([line], others[:2], others[2:]) if early else (others[:1], [others[1], line], others[2:]):
            await play.step(*lines)
        await _finish(play, on.size - (3 if early else 2))
        self._assert_same_bits(on, plain, line, f"in a batch, at {depth} steps in flight")

    async def _in_chunks(self, on: Bench, plain: _Plain, blocks: Sequence[int]) -> None:
        """In three odd chunks, beside a sequence that decodes."""
        size = on.size
        await on.launch_prefill(on.start(31, on.prompt(size + 1, salt=4), (8, 9)))
        line = Line(on.start(30, plain.prompt, blocks, sampler=plain.sampler), blocks, length=len(plain.prompt))
        await on.launch(starts=[line.start], chunks=[Chunk(30, 1, False)])
        await on.launch(chunks=[Chunk(30, size + 2, False)])
        line.take(await on.launch(leaves=[31], chunks=[Chunk(30, size, True)]), 0)
        await _finish(Play(on, 1, [line]), size - 1)
        self._assert_same_bits(on, plain, line, "in odd chunks")

    async def _behind_hit(
        self, on: Bench, plain: _Plain, blocks: Sequence[int], cached: int, way: str, count: int = 0
    ) -> None:
        """Begun with its first `count` tokens known, behind `cached` tokens whose KV is there."""
        known = plain.prompt + plain.line.tokens[:count]
        given: dict[str, Any] = {"cached": cached, "prompt_len": len(plain.prompt), "sampler": plain.sampler}
        line = Line(on.start(40, known, blocks, **given), blocks)
        play = Play(on, 1)
        await play.step(line)
        await _finish(play, on.size - count - 1)
        self._assert_same_bits(on, plain, line, way, count)

    async def _scores(
        self, on: Bench, prompt: list[int], blocks: Sequence[int], sampler: SamplerSpec, cuts: list[int],
        cached: int = 0,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Log-probs of the prompt's tokens that the sampler asks for, computed in chunks of these lengths."""
        starts = [on.start(50, prompt, blocks, cached=cached, sampler=sampler)]
        runs: list[PromptScores] = []
        for number, cut in enumerate(cuts):
            output = await on.launch(starts=starts, chunks=[Chunk(50, cut, number == len(cuts) - 1)])
            runs += output.scores
            starts = []
        await on.leave(50)
        check(runs, f"scores of a prompt of {len(prompt)} tokens", runs)
        return np.concatenate([parts(run)[0] for run in runs])

    def _assert_same_bits(self, on: Bench, plain: _Plain, line: Line, way: str, count: int = 0) -> None:
        """Raise AssertionError unless a sequence whose first `count` tokens were given has the numbers of `plain`."""
        equal(line.tokens, plain.line.tokens[count:], f"tokens of a sequence {way}")
        for name in ("raw", "processed") if self.logprobs else ():
            _same_bits(getattr(line, name), getattr(plain.line, name)[count:], f"{name} log-probs of a sequence {way}")
        equal(line.best, plain.line.best[count:], f"log-probs of the alternatives of a sequence {way}")
        rows = on.rows(line.blocks, 0, len(plain.prompt) + on.size - 1)
        for name, wanted in plain.rows.items():
            if name != "stamp":
                same_rows(rows[name], wanted, f"rows of {name} of a sequence {way}")


async def _finish(play: Play, steps: int) -> None:
    """So many steps, then all leave."""
    for _ in range(steps):
        await play.step()
    await play.end()


def _same_bits(found: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError, with the first that differs, unless all float32 values have the same bits."""
    one, other = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    equal(one.shape, other.shape, f"number of {what}")
    differing = np.flatnonzero(one.view(np.uint32) != other.view(np.uint32))
    if len(differing):
        at = int(differing[0])
        count = f"{len(differing)} of {len(one)} differ, the first at {at}"
        raise AssertionError(f"{what}: {count}: it returned {one[at]!r} instead of {other[at]!r}")
