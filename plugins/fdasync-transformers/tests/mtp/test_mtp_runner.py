"""A runner with multi-token prediction layers: the same tokens and rows, and their KV complete in its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.mtp.specs import carry_of
from fdasync_transformers.tiny.mtp import make_mtp_checkpoint
from mtp_play import Play, open_mtp
from step_driver import Driver

from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 9, 200, 13, 77, 21, 8, 150, 33], [7], [101, 4, 4, 90, 17]]


@pytest.mark.ci
async def test_tokens_and_rows_are_those_without_it(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "deepseek_v3")
    answers = []
    for mtp in (False, True):
        driver = await Driver.open(tmp_path, config={"mtp": mtp})
        sequences = [driver.sequence(prompt, 8, arrival) for arrival, prompt in enumerate(PROMPTS)]
        await driver.run(sequences, chunks=2)
        answers.append([(one.tokens, driver.rows(one)) for one in sequences])
        names = driver.capacity.kv_layout
        assert ("mtp" in names) == mtp
        if mtp:
            pool = driver.runner.bound.executor._bound.pool
            index = next(layer.index for layer in driver.runner.opened.model.step_model.layout.layers if layer.group)
            for one in sequences:
                held = pool.keys[index][one.blocks].flatten(0, 1)
                done = len(one.prompt) + len(one.tokens) - 1
                assert held[1:done].flatten(1).any(1).all()
        await driver.close()
    for (tokens, rows), (same, others) in zip(*answers, strict=True):
        assert tokens == same
        assert np.array_equal(rows, others)


@pytest.mark.ci
def test_examine_tells_the_price(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    reports = []
    for mtp in (False, True):
        config = TransformersConfig(dtype="float32", device="cpu", mtp=mtp)
        limits = RunnerLimits(model=str(tmp_path), max_running=4, max_step_tokens=64, block_tokens=4)
        reports.append(TransformersRunner(config, limits).examine())
    plain, with_mtp = reports
    assert with_mtp.served, with_mtp.reason
    assert with_mtp.kv_token_nbytes - plain.kv_token_nbytes == 4 * (64 + 8)
    assert with_mtp.weights_nbytes > plain.weights_nbytes
    assert with_mtp.aux_token_nbytes == plain.aux_token_nbytes
    assert any("multi-token prediction: 1 layers" in note for note in with_mtp.notes)


async def test_hand_over_of_a_block_in_part_keeps_what_it_carries(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    play = Play(open_mtp(tmp_path))
    lane, start = play.start(1, PROMPTS[0][:6])
    await play.step([], (start,), ((lane, 6),))
    before = play.mtp_bytes(lane.blocks[1])
    play.pool.clear_past(lane.blocks[1], 2)
    after = play.mtp_bytes(lane.blocks[1])
    carry = carry_of(play.model.layout)
    assert carry is not None
    assert torch.equal(play.pool.keys[carry.index][lane.blocks[1]], before[-1])
    assert torch.equal(after[0][:2], before[0][:2])
    assert not after[0][2:].any()
