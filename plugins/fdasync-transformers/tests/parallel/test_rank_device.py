"""Ranks on the path of GPUs, in Triton's interpreter: what one process computes by the same kernels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import make_small_checkpoint
from ranks import as_ranks, returned
from step_driver import Driver

from fdasync.cache.host_arena import HostArena
from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk, SwapIn, SwapOut

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks as forks: a GPU takes none")

DEVICE = {"kernels": "triton", "device": "cpu", "num_threads": 1, "self_check": False}


async def plays(folder: Path, exchange: Exchange | None, arena: HostArena, **config: Any) -> Any:
    """Two sequences, one of them in chunks beside the other's decodes; two steps in flight; out to the host and back."""
    driver = await Driver.open(
        folder, config={**DEVICE, **config}, exchange=exchange, host=arena, pipeline_depth=2, max_running=2
    )
    try:
        one = driver.sequence([5, 9, 200, 31, 7, 3, 2, 1, 99], 6)
        two = driver.sequence([7, 8, 9, 4, 4], 2)
        first = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 4, False)])
        second = driver.launch(starts=[driver.start(two)], chunks=[Chunk(two.key, 5, True), Chunk(one.key, 5, True)])
        assert not (await first).tokens
        for sequence, token in zip((two, one), (await second).tokens, strict=True):
            sequence.tokens.append(token)
        # a step is launched before the one before it has ended: tokens stay on the device
        flights = []
        for _ in range(2):
            appends = [append for sequence in (two, one) for append in driver.append(sequence)]
            flights.append(driver.launch(appends=appends))
            for sequence in (two, one):
                sequence.tokens.append(0)
        for at, flight in enumerate(flights):
            for sequence, token in zip((two, one), (await flight).tokens, strict=True):
                sequence.tokens[1 + at] = token
        rows = [driver.rows(sequence) for sequence in (one, two)] if driver.arena is not None else []
        # two full blocks leave, and a new sequence begins on them
        await driver.runner.copy(SwapOut(0, tuple(one.blocks[:2]), (2, 0)))
        again = driver.sequence(one.prompt, 1)
        blocks = [driver.free_blocks.pop() for _ in range(2)]
        await driver.runner.copy(SwapIn(1, (2, 0), tuple(blocks)))
        start = driver.start(again, blocks)
        output = await driver.step(leaves=(one.key, two.key), starts=[start], chunks=[Chunk(again.key, 1, True)])
        return [one.tokens, two.tokens, list(output.tokens)], rows, driver.capacity
    finally:
        await driver.close()


@pytest.mark.parametrize("fused", [False, True])
def test_two_ranks_answer_as_one_process(tmp_path: Path, fused: bool) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    config: dict[str, Any] = {"experts": "fused", "fused_layers": True} if fused else {"fused_router": False}
    arena = HostArena.create(4, 2048)

    def on(exchange: Exchange | None) -> Any:
        return asyncio.run(plays(tmp_path, exchange, arena, **config))

    try:
        tokens, rows, capacity = on(None)
        many = returned(as_ranks(2, on))
    finally:
        arena.close()
    assert [played[0] for played in many] == [tokens] * 2
    assert tokens[2] == tokens[0][:1]
    for mine, other in zip(rows, many[0][1], strict=True):
        assert np.array_equal(np.sort(mine, -1), np.sort(other, -1))
    if fused:
        said = [next(note for note in each.notes if note.startswith("fused:")) for each in (capacity, many[1][2])]
        assert said[0] == said[1]
        assert "2 of 2 decoder layers" in said[0]
