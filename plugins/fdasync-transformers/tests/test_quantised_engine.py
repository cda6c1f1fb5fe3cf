"""Engines over quantised checkpoints: tokens, rows, ids and updates equal those of the plain form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fdasync_trainer import Served, verify
from fdasync_transformers.tiny.packed_forms import FORMS
from quantised import make_form, make_fp8, make_mxfp4

from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [[number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 18)]] for number in range(4)]
NOTES = {
    "qwen3_moe": "FP8 dequantised to bfloat16: 91 tensors",
    "deepseek_v3": "FP8 dequantised to bfloat16: 104 tensors",
    "mxfp4": "MXFP4 dequantised to bfloat16: 8 tensors",
    "pack-quantized": "compressed-tensors (pack-quantized) dequantised to bfloat16: 72 tensors",
    "awq": "AWQ dequantised to bfloat16: 91 tensors",
    "gptq desc_act": "GPTQ dequantised to bfloat16: 91 tensors",
}


def make(tmp_path: Path, kind: str, seed: int = 0) -> tuple[Path, Path]:
    quantised, plain = tmp_path / f"quantised {seed}", tmp_path / f"plain {seed}"
    if kind == "mxfp4":
        make_mxfp4(quantised, plain, seed)
    elif kind in FORMS:
        make_form(quantised, plain, kind, seed)
    else:
        make_fp8(quantised, plain, kind, seed)
    return quantised, plain


def config(folder: Path, dtype: str = "auto") -> EngineConfig:
    own = {"dtype": dtype, "device": "cpu", "num_threads": 1, "self_check": dtype == "float32"}
    sizes: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 64, "max_running": 4}
    return EngineConfig(model=str(folder), runner_config=own, process="inline", tokenizer="none", **sizes)


async def play(engine: Engine) -> list[Result]:
    """One after the other, so that batches are the same in every engine."""
    return [await engine.complete(prompt, PARAMS) for prompt in PROMPTS]


def assert_same(one: list[Result], other: list[Result]) -> None:
    for a, b in zip(one, other, strict=True):
        (sample,), (twin,) = a.samples, b.samples
        assert len(sample.token_ids) > 0
        assert sample.token_ids == twin.token_ids
        assert sample.routing is not None
        assert twin.routing is not None
        assert np.array_equal(sample.routing.array, twin.routing.array)


@pytest.mark.ci
@pytest.mark.parametrize("kind", NOTES)
async def test_tokens_and_rows_equal_those_of_the_plain_form(tmp_path: Path, kind: str) -> None:
    quantised, plain = make(tmp_path, kind)
    new, new_plain = make(tmp_path, kind, seed=1)
    async with Engine(config(quantised)) as engine, Engine(config(plain)) as twin:
        assert NOTES[kind] in engine.capacity.notes
        assert not [note for note in twin.capacity.notes if "dequantised" in note]
        assert engine.capacity.weights_id == twin.capacity.weights_id
        assert engine.capacity.fingerprint == twin.capacity.fingerprint
        assert engine.capacity.dtype == "bfloat16"
        old_id = engine.capacity.weights_id
        first = await play(engine)
        assert_same(first, await play(twin))
        # each takes the other form
        await engine.update_weights("new", str(new_plain))
        await twin.update_weights("new", str(new))
        assert engine.capacity.weights_id == twin.capacity.weights_id != old_id
        second = await play(engine)
        assert_same(second, await play(twin))
        assert [r.samples[0].token_ids for r in second] != [r.samples[0].token_ids for r in first]
        engine.check()
        twin.check()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("kind", NOTES)
async def test_a_quantised_folder_is_verified(tmp_path: Path, kind: str) -> None:
    quantised, _ = make(tmp_path, kind)
    async with Engine(config(quantised, "float32")) as engine:
        report = verify(quantised, [Served.from_result(result) for result in await play(engine)])
    assert report.ok
    assert report.tokens_checked > 0
    assert report.rows_checked > 0
