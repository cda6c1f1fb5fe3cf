"""Ranks on the path of GPUs verify drafts, two steps in flight, in Triton's interpreter: tokens are as without them, on
the path of CPUs."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import make_small_checkpoint
from ranks import as_ranks, returned
from step_driver import Driver

from fdasync.events.actions import Chunk
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import runs_of

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks as forks: a GPU takes none")

CONFIG = {"kernels": "triton", "device": "cpu", "num_threads": 1, "self_check": False, "fused_router": False}
PROMPTS = ((5, 9, 200, 13, 77, 21), (7, 3))
NOISY = {"temperature": 1.0, "repetition_penalty": 1.0}
COUNT, MOST = 14, 3


async def without(folder: Path) -> Any:
    """By the path of CPUs, which `test_device_path.py` holds the other one against."""
    driver = await Driver.open(folder, config={"device": "cpu", "num_threads": 1, "self_check": False})
    sequences = [driver.sequence([*prompt], COUNT, **NOISY) for prompt in PROMPTS]
    await driver.run(sequences)
    rows = [driver.rows(one) for one in sequences]
    await driver.close()
    return [one.tokens for one in sequences], rows


async def with_drafts(folder: Path, exchange: Exchange | None, streams: list[list[int]]) -> Any:
    """Paths behind the last token that is known, right up to a wrong one at every fifth position, of the second
    sequence in every other step."""
    driver = await Driver.open(folder, config=CONFIG, exchange=exchange, speculation=MOST, pipeline_depth=2)
    sequences = [driver.sequence([*prompt], COUNT, **NOISY) for prompt in PROMPTS]
    starts = [driver.start(one) for one in sequences]
    output = await driver.step(starts=starts, chunks=[Chunk(one.key, len(one.prompt), True) for one in sequences])
    lengths: list[list[int]] = []
    flights: deque[asyncio.Future[Any]] = deque()

    def take(output: Any) -> None:
        for one, run in zip(sequences, runs_of(output), strict=True):
            one.tokens += run
        lengths.append([len(run) for run in runs_of(output)])

    take(output)
    steps = 0
    while min(len(one.tokens) for one in sequences) < COUNT:
        paths, appends = {}, []
        for number, one in enumerate(sequences):
            known = len(one.tokens)
            path = [
                token if at % 5 else (token + 1) % 250
                for at, token in enumerate(streams[number][known : known + 2 * MOST + 1], known)
            ]
            if path and (steps + number) % 2 == 0:
                paths[one.key] = (len(one.prompt) + known, path, MOST)
            appends += driver.append(one, ahead=2 * MOST + 2)
        flights.append(driver.launch(appends=appends, drafts=drafts_of(paths)))
        steps += 1
        if exchange is None or exchange.rank == 0:
            # one rank knows how a step has ended before the next is launched, the other does not
            await asyncio.wait([flights[-1]])
        if len(flights) == 2:
            take(await flights.popleft())
    while flights:
        take(await flights.popleft())
    for one in sequences:
        del one.tokens[COUNT:]
    rows = None if driver.arena is None else [driver.rows(one) for one in sequences]
    await driver.close()
    return [one.tokens for one in sequences], lengths, rows


@pytest.mark.ci
def test_ranks_that_learn_of_ends_at_other_times_verify_alike(tmp_path: Path) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    streams, rows = asyncio.run(without(tmp_path))
    played = returned(as_ranks(2, lambda exchange: asyncio.run(with_drafts(tmp_path, exchange, streams))))
    for tokens, lengths, _ in played:
        assert tokens == streams
        assert lengths == played[0][1]
    # no draft, all of them, and some with a wrong one behind them
    assert {1, 3, 4} <= {length for lengths in played[0][1] for length in lengths}
    for own, other in zip(rows, played[0][2], strict=True):
        assert np.array_equal(np.sort(own, -1), np.sort(other, -1))
