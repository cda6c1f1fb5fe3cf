"""Ranks of a group verify the same drafts: tokens, runs and rows are those of one process without drafts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from rank_play import CONFIG
from ranks import as_ranks, returned
from step_driver import Driver

from fdasync.events.actions import Chunk
from fdasync.testing.runners.drafts import drafts_of
from fdasync.testing.runners.runs import runs_of

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

PROMPTS = [[5, 9, 200, 13, 77, 21], [7, 3]]
# the second sequence has penalties, and so no drafts
NOISY: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.3}]
COUNT = 12


async def answers(folder: Path) -> Any:
    driver = await Driver.open(folder, config=CONFIG)
    sequences = [driver.sequence(prompt, COUNT, **own) for prompt, own in zip(PROMPTS, NOISY, strict=True)]
    await driver.run(sequences)
    rows = [driver.rows(one) for one in sequences]
    await driver.close()
    return [one.tokens for one in sequences], rows


async def with_drafts(folder: Path, exchange: Exchange, streams: list[list[int]]) -> Any:
    """Drafts of 1 to 3 right tokens, fewer with a wrong one behind them; of the second sequence none at first."""
    driver = await Driver.open(folder, config=CONFIG, exchange=exchange, speculation=3)
    assert driver.capacity.max_run_tokens == 4
    sequences = [driver.sequence(prompt, COUNT, **own) for prompt, own in zip(PROMPTS, NOISY, strict=True)]
    starts = [driver.start(one) for one in sequences]
    for one in sequences:
        one.planned = len(one.prompt)
    output = await driver.step(starts=starts, chunks=[Chunk(one.key, len(one.prompt), True) for one in sequences])
    lengths, steps = [], 0
    while True:
        for one, run in zip(sequences, runs_of(output), strict=True):
            one.tokens += run
        lengths.append([len(run) for run in runs_of(output)])
        if min(len(one.tokens) for one in sequences) >= COUNT:
            break
        paths, appends = {}, []
        for number, one in enumerate(sequences):
            known, right = len(one.tokens), 1 + (steps + number) % 3
            drafts = streams[number][known : known + right]
            if len(drafts) < 3:
                drafts.append((streams[number][min(known + len(drafts), COUNT - 1)] + 1) % 250)
            if number <= steps:
                paths[one.key] = (len(one.prompt) + known, drafts, 3)
            appends += driver.append(one, ahead=3)
        output = await driver.step(appends=appends, drafts=drafts_of(paths))
        steps += 1
    found = [one.tokens[:COUNT] for one in sequences], lengths
    rows = None if exchange.rank else [rows_of(driver, one) for one in sequences]
    await driver.close()
    return *found, rows


def rows_of(driver: Driver, one: Any) -> Any:
    one.tokens = one.tokens[:COUNT]
    return driver.rows(one)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2])
def test_ranks_verify_alike(tmp_path: Path, ranks: int) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", attention_bias=True)
    streams, rows = asyncio.run(answers(tmp_path))
    played = returned(as_ranks(ranks, lambda exchange: asyncio.run(with_drafts(tmp_path, exchange, streams))))
    for tokens, lengths, _ in played:
        assert tokens == streams
        assert lengths == played[0][1]
    first, second = ({lengths[number] for lengths in played[0][1]} for number in range(2))
    assert (first, second) == ({1, 2, 3, 4}, {1})
    for own, other in zip(rows, played[0][2], strict=True):
        assert np.array_equal(own, other)
