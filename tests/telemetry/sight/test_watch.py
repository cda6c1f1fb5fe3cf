"""What engines and routers show of themselves: held against the results that their callers got."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import fdasync
from fdasync import SamplingParams
from fdasync.errors import EngineClosed, EngineFailed
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.telemetry.sight.latencies import total
from fdasync.testing import held_engine, synthetic_config, synthetic_engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fdasync.telemetry.sight.sight import Watched

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], list(range(30, 47))]


def picked(results: Sequence[fdasync.Result]) -> np.ndarray:
    """The experts in the rows of results, of the synthetic model's shape."""
    counts = np.zeros((4, 16), np.int64)
    for result in results:
        assert result.routing is not None
        for layer in range(4):
            counts[layer] += np.bincount(result.routing.array[:, layer].reshape(-1), minlength=16)
    return counts


def told(watched: Sequence[Watched], version: str) -> np.ndarray:
    tables = [
        picks for one in watched if one.sight is not None for picks in one.sight.picks if picks.version == version
    ]
    return sum([np.frombuffer(picks.table, "<i8").reshape(4, 16) for picks in tables], np.zeros((4, 16), np.int64))


async def play(generator: fdasync.Generator) -> list[fdasync.Result]:
    results = []
    for prompt in PROMPTS:
        async with generator.generate(prompt, SamplingParams(max_tokens=7, seed=3)) as stream:
            async for _ in stream:
                pass
        results.append(stream.result)
    return results


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder of other weights."""
    (tmp_path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 9}))
    return tmp_path


@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_an_engine_shows_the_experts_in_its_rows_by_weights(process: str, other: Path) -> None:
    async with synthetic_engine(synthetic_config({"pass_stamp": False}, process=process)) as engine:
        before = await play(engine)
        await engine.set_weight_version("0b")
        (one,) = await engine.watch()
        assert one.sight is not None
        assert [picks.version for picks in one.sight.picks] == ["0b"]
        assert (told([one], "0b") == picked(before)).all()
        await engine.update_weights("1", other)
        after = await play(engine)
        (one,) = await engine.watch()
        assert one.sight is not None
        assert [picks.version for picks in one.sight.picks] == ["1", "0b"]
        assert (told([one], "0b") == picked(before)).all()
        assert (told([one], "1") == picked(after)).all()
        assert (picked(before) != picked(after)).any()
        sight, counted = one.sight, one.sight.stats.scheduler
        assert (sight.stats.tokens, counted.prompt_tokens, counted.finished) == (2 * 3 * 7, 2 * (8 + 6 + 17), 6)
        assert (total(sight.ttft), total(sight.tpot), total(sight.total)) == (6, 6, 6)
        assert sight.total_s == pytest.approx(sum(result.total_s for result in (*before, *after)))
        assert dict(sight.ends) == {"length": 6}
        assert counted.used_slots == counted.used_blocks + counted.idle_blocks > 0
    with pytest.raises(EngineClosed):
        await synthetic_engine().watch()


async def test_debug_rows_are_no_picks_and_a_dense_model_has_none() -> None:
    for values, runner in (({"routing_debug": True}, {}), ({}, {"num_moe_layers": 0})):
        async with synthetic_engine(synthetic_config(runner, **values)) as engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
            (one,) = await engine.watch()
            assert one.sight is not None
            assert one.sight.picks == ()
            assert one.sight.stats.tokens == 3


async def test_states_are_told_and_a_failure_is_raised() -> None:
    engine, faults = held_engine()
    async with engine:
        assert (await engine.watch())[0].sight.stats.state == "running"  # type: ignore[union-attr]
        await engine.pause()
        assert (await engine.watch())[0].sight.stats.state == "paused"  # type: ignore[union-attr]
        await engine.resume()
        await engine.drain()
        assert (await engine.watch())[0].sight.stats.state == "draining"  # type: ignore[union-attr]
        engine.fail(OSError("the end"))
        with pytest.raises(EngineFailed):
            await engine.watch()
        faults.release()
        # a caller has got the failure
        with pytest.raises(EngineFailed):
            await engine.complete([1])
