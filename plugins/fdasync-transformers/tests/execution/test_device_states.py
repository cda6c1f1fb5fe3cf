"""Recurrent state on the path of GPUs, by hand-made steps: what a scheduler may ask and seldom does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from device_path import DEVICE
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver, sampler_spec

from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk, RunStep, SeqStart, TakeSnapshot

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [31, 7, 90, 12, 45, 66, 3, 18]


@pytest.fixture
async def driver(tmp_path: Path) -> Any:
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    made = await Driver.open(tmp_path, config={**DEVICE, "self_check": False}, num_snapshots=2)
    yield made
    await made.close()


def start(key: int, blocks: tuple[int, ...], cached: int = 0, snapshot: int = -1) -> SeqStart:
    tokens = np.array(PROMPT, "<i4").tobytes()
    slots = tuple(range(10 * key, 10 * key + len(blocks) - cached // 4))
    return SeqStart(key, tokens, cached, blocks, slots, (1,) * len(slots), sampler_spec(len(PROMPT)), snapshot)


@pytest.mark.ci
async def test_a_sequence_may_start_a_step_before_its_first_tokens(driver: Driver) -> None:
    take = TakeSnapshot(1, 4, 1)
    whole = await driver.runner.launch(
        RunStep(1, starts=(start(1, (5, 9)),), chunks=(Chunk(1, 8, True),), snapshots=(take,))
    )
    await driver.runner.launch(RunStep(2, leaves=(1,), starts=(start(2, (5, 6), 4, 1),)))
    # the place may hold another state by then
    again = start(3, (7, 8))
    await driver.runner.launch(
        RunStep(3, starts=(again,), chunks=(Chunk(3, 2, False),), snapshots=(TakeSnapshot(3, 2, 1),))
    )
    behind = await driver.runner.launch(RunStep(4, chunks=(Chunk(2, 4, True),)))
    assert behind.tokens == whole.tokens


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ({"starts": (start(1, (5, 9), 4),), "chunks": (Chunk(1, 4, True),)}, "behind 4 tokens, from snapshot -1"),
        (
            {
                "starts": (start(1, (5, 9)),),
                "chunks": (Chunk(1, 4, False),),
                "snapshots": (TakeSnapshot(1, 5, 0),),
            },
            "a snapshot behind row 5",
        ),
    ],
)
async def test_what_cannot_be_fails_the_step(driver: Driver, first: dict[str, Any], reason: str) -> None:
    with pytest.raises(RunnerError, match=reason):
        await driver.runner.launch(RunStep(1, **first))
