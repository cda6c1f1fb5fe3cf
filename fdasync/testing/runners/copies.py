"""The part of the conformance suite for runners about copies of blocks between device and host.

Used by `runners/suite.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import RunnerError
from fdasync.events.actions import SwapIn, SwapOut
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import on_bench
from fdasync.testing.runners.harness import RunnerSuite, is_runner_error

if TYPE_CHECKING:
    from fdasync.runner.base import CopyOutput
    from fdasync.testing.runners.bench import Bench

_LIMIT_S = 120.0


class CopyTests(RunnerSuite):
    """KV that was swapped out and in gives the same answers, and copies touch no rows."""

    @on_loop
    async def test_swapped_out_and_in_elsewhere_blocks_answer_as_before(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=4) as on:
            size = on.size
            prompt = on.prompt(2 * size + 3)
            plain = await on.answer(0, prompt, 4, [0, 1, 2])
            self._assert_moved(on, await on.swap_out([0, 1], [3, 0]), 2)
            # the device blocks stay as they are
            self.assert_same(plain, await on.answer(1, prompt, 4, [0, 1, 5], cached=2 * size))
            # the same blocks with other tokens, other rows
            await on.answer(2, on.prompt(3 * size, salt=1), 1, [0, 1, 2])
            self._assert_moved(on, await on.swap_in([3, 0], [7, 5]), 2)
            self.assert_same(plain, await on.answer(3, prompt, 4, [7, 5, 9], cached=2 * size))
            # each in its place, not both in either
            self.assert_same(plain, await on.answer(5, prompt, 4, [7, 10, 9], cached=size))
            # the host blocks stay as they are, too
            await on.swap_in([0, 3], [1, 0])
            self.assert_same(plain, await on.answer(4, prompt, 4, [0, 1, 2], cached=2 * size))

    @on_loop
    async def test_a_host_block_is_what_was_written_last(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=2) as on:
            size = on.size
            prompts = [on.prompt(size + 2, salt=salt) for salt in range(2)]
            plain = [await on.answer(key, prompts[key], 3, [2 * key, 2 * key + 1]) for key in range(2)]
            await on.swap_out([0], [1])
            await on.swap_out([2], [1])
            await on.swap_in([1], [8])
            self.assert_same(plain[1], await on.answer(3, prompts[1], 3, [8, 9], cached=size))

    @on_loop
    async def test_copies_in_flight_with_steps_between_them(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=6) as on:
            size = on.size
            prompts = [on.prompt(size + 2, salt=salt) for salt in range(3)]
            plain = [await on.answer(key, prompts[key], 3, [2 * key, 2 * key + 1]) for key in range(3)]
            running = on.prompt(5)
            alone = (await on.answer(9, running, 4, [10])).tokens
            tokens = list((await on.launch_prefill(on.start(10, running, [11]))).tokens)
            for number in range(2):
                copies = [on.swap_out([2 * key], [2 * key + number]) for key in range(3)]
                tokens += await on.step()
                await asyncio.gather(*copies)
            await on.leave(10)
            equal(tokens, alone[:3], "tokens of a sequence that runs beside copies to the host")
            clobber = on.prompt(size + 1, salt=8)
            for key in range(3):
                await on.answer(20 + key, clobber, 1, [2 * key, 2 * key + 1])
            # back, crosswise, each in a copy of its own
            tokens = list((await on.launch_prefill(on.start(11, running, [11]))).tokens)
            places = [2, 4, 0]
            back = [on.swap_in([2 * key + 1], [places[key]]) for key in range(3)]
            tokens += await on.step()
            await asyncio.gather(*back)
            tokens += await on.step()
            await on.leave(11)
            equal(tokens, alone[:3], "tokens of a sequence that runs beside copies from the host")
            for key in range(3):
                again = await on.answer(30 + key, prompts[key], 3, [places[key], 9], cached=size)
                self.assert_same(plain[key], again)

    @on_loop
    async def test_many_blocks_in_one_copy(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=9) as on:
            size = on.size
            prompts = [on.prompt(3 * size + 1, salt=salt) for salt in range(3)]
            plain = [await on.answer(key, prompts[key], 2, [*range(3 * key, 3 * key + 3), 9]) for key in range(3)]
            random = np.random.default_rng(1)
            host = [int(place) for place in random.permutation(9)]
            self._assert_moved(on, await on.swap_out(range(9), host), 9)
            for key in range(3):
                await on.answer(10 + key, on.prompt(3 * size, salt=10 + key), 1, range(3 * key, 3 * key + 3))
            device = [int(block) for block in random.permutation(9)]
            self._assert_moved(on, await on.swap_in(host, device), 9)
            for key in range(3):
                again = await on.answer(20 + key, prompts[key], 2, [*device[3 * key : 3 * key + 3], 9], cached=3 * size)
                # the open tail is computed again, and the blocks before it are not
                self.assert_same(plain[key], again)

    @on_loop
    async def test_a_copy_that_makes_no_sense_fails(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            # there is no host tier
            await _fails(on.runner.copy(SwapOut(0, (0,), (0,))))
        outside = 10**6
        ways = (
            SwapOut(0, (0,), (outside,)),
            SwapOut(0, (outside,), (0,)),
            SwapIn(0, (outside,), (0,)),
            SwapIn(0, (0,), (outside,)),
        )
        for way in ways:
            async with on_bench(self.make(self.limits), host_blocks=2) as on:
                await _fails(on.runner.copy(way))

    @on_loop
    async def test_a_copy_after_a_failed_step_ends(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=2) as on:
            failed = on.launch(leaves=[99])
            copy = on.swap_out([0], [0])
            await asyncio.wait([failed], timeout=_LIMIT_S)
            await asyncio.wait([copy], timeout=_LIMIT_S)
            is_runner_error(failed, "a step that makes no sense")
            check(copy.done(), f"a copy after a failed step ends within {_LIMIT_S:g} s", copy)
            error = copy.exception()
            check(isinstance(error, RunnerError | None), "a copy after a failed step ends or raises RunnerError", error)

    @on_loop
    async def test_aclose_ends_copies(self) -> None:
        async with on_bench(self.make(self.limits), host_blocks=2) as on:
            copy = on.swap_out([0], [0])
            await on.runner.aclose()
            await asyncio.wait([copy], timeout=_LIMIT_S)
            check(copy.done(), f"a copy ends within {_LIMIT_S:g} s of aclose", copy)
            _ = copy.cancelled() or copy.exception()

    def _assert_moved(self, on: Bench, moved: CopyOutput, blocks: int) -> None:
        equal(moved.kv_nbytes, blocks * on.capacity.block_nbytes, f"bytes of KV of a copy of {blocks} blocks")
        equal(moved.aux_nbytes, 0, "bytes of rows of a copy, where only KV is to move")


async def _fails(copy: asyncio.Future[CopyOutput]) -> None:
    await asyncio.wait([copy], timeout=_LIMIT_S)
    check(copy.done(), f"a copy of what does not exist ends within {_LIMIT_S:g} s", copy)
    is_runner_error(copy, "a copy of what does not exist")
