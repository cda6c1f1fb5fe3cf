"""docs/write-a-datum.md as a distribution: its class, its entry point and its test, and its rows through engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from tests.support.page_plugin import install, output_of, run_tests

if TYPE_CHECKING:
    from fdasync import Result

PAGE = Path(__file__).parents[4] / "docs" / "write-a-datum.md"
PROMPTS = [[first, *[first * at % 90 + 3 for at in range(1, 22)]] for first in (5, 7, 11)]
NEW = 9
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
NAME = "router_entropy"


@pytest.mark.ci
def test_the_datum_of_the_page_installs_and_passes_its_test(tmp_path: Path) -> None:
    install(PAGE, tmp_path, NAME)
    assert "1 passed" in run_tests(tmp_path, NAME)
    assert NAME in output_of(tmp_path, "-m", "fdasync", "plugins")


@pytest.mark.ci
async def test_its_rows_over_hits_swaps_and_preemption_are_those_that_are_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fixed numerics: bit by bit. Blocks are few, so requests at once take them from each other."""
    install(PAGE, tmp_path, NAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "aux": [NAME]}
    config = EngineConfig(
        model=str(tmp_path / "model"), runner_config=own, process="inline", tokenizer="none", numerics="fixed",
        block_tokens=4, num_blocks=18, host_blocks=64, max_context_tokens=64, max_running=3, max_step_tokens=32,
        decode_reserve_blocks=0,
    )  # fmt: skip
    async with Engine(config) as engine:
        anew = [rows_of(await engine.complete(prompt, PARAMS, cache_salt="alone")) for prompt in PROMPTS]
        assert not np.array_equal(anew[0], anew[1])
        for _ in range(2):
            results = await asyncio.gather(*[engine.complete(prompt, PARAMS) for prompt in PROMPTS])
            for result, rows in zip(results, anew, strict=True):
                assert np.array_equal(rows_of(result), rows)
        assert all(result.cached_tokens >= 20 for result in results)
        counted = engine.stats().scheduler
        assert min(counted.preemptions, counted.swapped_in_blocks) > 0
        engine.check()


def rows_of(result: Result) -> np.ndarray[Any, Any]:
    (sample,) = result.samples
    rows = np.asarray(sample.aux[NAME])
    assert (rows.dtype, rows.shape) == (np.float16, (22 + NEW - 1, 3))
    assert (rows > 0).all()
    return rows
