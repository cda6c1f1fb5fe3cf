"""Conformance of runners that tell the positions that indexers chose (`Runner.lend`). Mixed into `RunnerTests`.

Nothing is asked of a runner whose `Capacity.chosen` is None.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fdasync.events.actions import Chunk
from fdasync.runner.chosen import ChosenRows
from fdasync.testing.harness.bounded import on_loop
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.runners.bench import GREEDY, on_bench
from fdasync.testing.runners.harness import RunnerSuite, same_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.testing.runners.bench import Bench

# no runner chooses it
_MARK = -7


class PositionTests(RunnerSuite):
    """See the module."""

    @on_loop
    async def test_a_sequence_has_the_chosen_positions_of_all_its_tokens(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.capacity.chosen is None:
                return
            size = on.size
            prompt, blocks = on.prompt(2 * size + 3), [7, 2, 5]
            rows = await lent(on, 0, 0, len(prompt) + 2)
            sampler = msgspec.structs.replace(GREEDY, chosen_from=0)
            start = on.start(0, prompt, blocks, sampler=sampler)
            await on.launch(starts=[start], chunks=[Chunk(0, size + 1, False)])
            equal(rows.count, size + 1, "rows that stand behind a chunk")
            await on.launch(chunks=[Chunk(0, len(prompt) - size - 1, True)])
            equal(rows.count, len(prompt), "rows that stand behind a prompt")
            # more tokens than there is room for: the last one is forwarded for nobody
            await on.decode(0, len(prompt), blocks, 3)
            equal(rows.count, rows.most, "rows that stand at the end")
            check_positions(rows, 0)
            await on.leave(0)
            on.runner.take_back(0)

    @on_loop
    async def test_chosen_positions_are_those_of_one_sequence_from_its_first_on(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.capacity.chosen is None:
                return
            prompt = on.prompt(on.size + 3)
            whole = await positions_of(on, 0, prompt, [0, 1])
            late = await lent(on, 1, on.size, 3)
            own = await lent(on, 2, 0, 5)
            starts = [
                on.start(number, tokens, blocks, sampler=msgspec.structs.replace(GREEDY, chosen_from=first))
                for number, tokens, blocks, first in (
                    (1, prompt, [9, 4], on.size), (2, on.prompt(5, salt=1), [6], 0), (3, on.prompt(4, salt=2), [8], -1),
                )
            ]  # fmt: skip
            await on.launch_prefill(*starts)
            equal((late.count, own.count), (3, 5), "rows of two sequences of a step of three")
            check_positions(late, on.size)
            check_positions(own, 0)
            if self.batch_safe:
                same_rows(late.rows.copy(), whole[on.size :], "chosen positions of a sequence beside others")

    @on_loop
    async def test_rows_that_stand_stay_when_a_sequence_starts_again(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.capacity.chosen is None:
                return
            prompt = on.prompt(on.size + 3)
            rows = await lent(on, 0, 0, len(prompt) + 1)
            sampler = msgspec.structs.replace(GREEDY, chosen_from=0)
            start = on.start(0, prompt, [0, 1], sampler=sampler)
            await on.launch(starts=[start], chunks=[Chunk(0, on.size, False)])
            await on.leave(0)
            # as if the request had taken these already
            rows.rows[: on.size] = _MARK
            await on.launch_prefill(on.start(0, prompt, [4, 3], sampler=sampler))
            equal(rows.count, len(prompt), "rows that stand behind a second start")
            check(
                bool((rows.rows[: on.size] == _MARK).all()), "rows that stood before a second start stay", rows.rows[0]
            )
            check_positions(rows, on.size, first=on.size)
            await on.leave(0)
            on.runner.take_back(0)
            # the number is as good as new
            await positions_of(on, 0, prompt, [0, 1])

    @on_loop
    async def test_a_call_of_lend_that_is_cancelled_is_taken_back(self) -> None:
        async with on_bench(self.make(self.limits)) as on:
            if on.capacity.chosen is None:
                return
            prompt = on.prompt(3)
            for turns in range(1, 4):
                task = asyncio.ensure_future(lent(on, 0, 0, len(prompt)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                # it may have been lent or not
                on.runner.take_back(0)
                await positions_of(on, 0, prompt, [0])


async def lent(on: Bench, key: int, start: int, most: int) -> ChosenRows:
    """Rows of a sequence, which the runner has. The caller keeps no descriptor, since there may be many sequences."""
    shape = on.capacity.chosen
    assert shape is not None, f"capacity.chosen of {on.capacity.model} is {shape}: no request can ask for positions"
    rows = ChosenRows.create(shape, start, most)
    rows.rows[:] = _MARK
    try:
        await on.runner.lend(key, rows)
    finally:
        rows.close_fd()
    return rows


async def positions_of(on: Bench, key: int, prompt: Sequence[int], blocks: Sequence[int]) -> NDArray[np.int32]:
    """What is chosen for the tokens of a prompt, computed alone in one step."""
    rows = await lent(on, key, 0, len(prompt))
    sampler = msgspec.structs.replace(GREEDY, chosen_from=0)
    await on.launch_prefill(on.start(key, prompt, blocks, sampler=sampler))
    await on.leave(key)
    on.runner.take_back(key)
    equal(rows.count, len(prompt), "rows that stand behind a prompt")
    check_positions(rows, 0)
    return rows.rows.copy()


def check_positions(rows: ChosenRows, position: int, first: int = 0) -> None:
    """Raise AssertionError unless each row from `first` on, that of `position`, has positions that its token sees, none
    twice, and -1 behind the last of them."""
    for at in range(first, rows.count):
        token = position + at - first
        for layer, found in zip(rows.shape.layer_ids, rows.rows[at].tolist(), strict=True):
            chosen = [one for one in found if one != -1]
            what = f"chosen positions of token {token} in layer {layer}"
            check(bool(chosen), f"{what} are one at least", found)
            equal(found, chosen + [-1] * (len(found) - len(chosen)), f"{what}, with -1 behind the last")
            check(all(0 <= one <= token for one in chosen), f"{what} are of tokens up to it", found)
            equal(len(set(chosen)), len(chosen), f"{what}, counted without those that are there twice")
