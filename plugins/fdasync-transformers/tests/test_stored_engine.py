"""Engines whose experts stay as stored, against engines of the same folder that dequantise them.

On a GPU with graphs, in a worker; without one in Triton's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import DEVICE, ON_GPU, answers, assert_same
from fdasync_transformers import named_tensors, weights_fingerprint
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.shards import SINGLE_FILE
from quantised import make_fp8, make_mxfp4
from safetensors.torch import load_file

from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

# the interpreter takes a tenth of a second for each kernel
PROMPTS = [
    [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 9)]] for number in range(3 if ON_GPU else 1)
]
NEW = 16 if ON_GPU else 2
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0], "hidden_size": 64, "num_experts": 4}
SIZES["moe_intermediate_size"] = 256 if ON_GPU else 128
FEW: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
NOTES = {"fp8": "FP8 kept as stored: 12 tensors", "mxfp4": f"MXFP4 kept as stored: {8 if ON_GPU else 4} tensors"}


def make(tmp_path: Path, kind: str, seed: int = 0) -> tuple[Path, Path]:
    quantised, plain = tmp_path / f"quantised {seed}", tmp_path / f"plain {seed}"
    if kind == "mxfp4":
        make_mxfp4(quantised, plain, seed, **({} if ON_GPU else FEW))
    else:
        make_fp8(quantised, plain, "qwen3_moe", seed, (128, 128), **SIZES)
    return quantised, plain


def config(folder: Path, *, stored: bool = True, **values: Any) -> EngineConfig:
    own: dict[str, Any] = {**DEVICE, "experts": "fused", "quantised_weights": "stored" if stored else "dequantised"}
    own |= {"self_check": ON_GPU, "sleep": ON_GPU}
    sizes: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 64, "max_running": 4}
    place: dict[str, Any] = {"process": "worker" if ON_GPU else "inline", "host_blocks": 32, "runner_config": own}
    return EngineConfig(model=str(folder), tokenizer="none", **{**sizes, **place, **values})


async def play(engine: Engine) -> list[Result]:
    """One after the other, so that batches are the same in every engine."""
    params = SamplingParams(max_tokens=NEW, temperature=0.0, logprobs="raw")
    return [await engine.complete(prompt, params) for prompt in PROMPTS]


def assert_alike(one: list[Result], other: list[Result]) -> None:
    for a, b in zip(one, other, strict=True):
        (sample,), (twin,) = a.samples, b.samples
        assert sample.token_ids == twin.token_ids
        assert sample.routing is not None
        assert twin.routing is not None
        assert np.array_equal(sample.routing.array, twin.routing.array)
        assert sample.logprobs is not None
        assert twin.logprobs is not None
        if ON_GPU:
            # products have the bits of plain weights
            assert np.array_equal(sample.logprobs, twin.logprobs)
        else:
            assert np.allclose(sample.logprobs, twin.logprobs, atol=2e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NOTES)
async def test_answers_and_ids_are_those_of_the_dequantised_engine(tmp_path: Path, kind: str) -> None:
    quantised, _ = make(tmp_path, kind)
    new, new_plain = make(tmp_path, kind, 1)
    async with Engine(config(quantised)) as engine, Engine(config(quantised, stored=False)) as twin:
        assert NOTES[kind] in engine.capacity.notes
        assert not [note for note in twin.capacity.notes if "kept" in note]
        # blocks of one are blocks of the other
        assert engine.capacity.weights_id == twin.capacity.weights_id
        assert engine.capacity.fingerprint == twin.capacity.fingerprint
        first = await play(engine)
        assert_alike(first, await play(twin))
        await engine.update_weights("folder", str(new))
        await twin.update_weights("folder", str(new))
        assert engine.capacity.weights_id == twin.capacity.weights_id
        second = await play(engine)
        assert_alike(second, await play(twin))
        assert [r.samples[0].token_ids for r in second] != [r.samples[0].token_ids for r in first]
        # as the checkpoint has them
        await engine.update_weights("quantised", named_tensors(load_file(quantised / SINGLE_FILE)))
        assert_alike(await play(engine), first)
        # plain ones, by the recipe
        plain = loading.load(loading.read_checkpoint(str(new_plain)), "auto", torch.device("cpu"))
        expected = weights_fingerprint(plain, dtype="bfloat16", stored=kind)  # type: ignore[arg-type]
        await engine.update_weights("plain", named_tensors(plain), expected=expected)
        assert engine.capacity.weights_id == expected.weights_id
        await play(engine)
        engine.check()
        twin.check()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NOTES)
async def test_they_sleep_and_wake(tmp_path: Path, kind: str) -> None:
    quantised, _ = make(tmp_path, kind)
    own = {**config(quantised).runner_config, "sleep": True}
    async with Engine(config(quantised, runner_config=own)) as engine:
        wanted = await play(engine)
        before = engine.capacity.weights_id
        await engine.sleep(1)
        await engine.wake()
        assert_alike(await play(engine), wanted)
        await engine.sleep(2)
        await engine.wake(["weights"])
        await engine.update_weights("again", str(quantised))
        await engine.wake(["kv_cache", "cuda_graph"])
        assert engine.capacity.weights_id == before
        assert_alike(await play(engine), wanted)
        engine.check()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an engine gives each rank a GPU of its own")
async def test_ranks_hold_whole_blocks(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "fp8")
    new, _ = make(tmp_path, "fp8", 1)
    ranks: dict[str, Any] = {"tensor_parallel": 2, "process": "worker", "host_blocks": 0}
    found, ids = [], []
    for stored in (True, False):
        ranked = config(quantised, stored=stored, **ranks)
        own = {**ranked.runner_config, "sleep": False}
        async with Engine(config(quantised, stored=stored, **ranks, runner_config=own)) as engine:
            first = await play(engine)
            await engine.update_weights("tensors", named_tensors(load_file(new / SINGLE_FILE)))
            second = await play(engine)
            await engine.update_weights("folder", str(new))
            assert_alike(await play(engine), second)
            found.append((first, second))
            ids.append(engine.capacity.weights_id)
            engine.check()
    assert ids[0] == ids[1]
    for one, other in zip(*found, strict=True):
        assert_alike(one, other)


@pytest.mark.nightly
async def test_linear_layers_stay_too(tmp_path: Path) -> None:
    """Their products have sums of another order than the library's."""
    quantised, _ = make(tmp_path, "fp8")
    new, _ = make(tmp_path, "fp8", 1)
    ranked = config(quantised)
    layers = {**ranked.runner_config, "quantised_weights": "stored_linears", "fused_layers": True}
    async with Engine(config(quantised, runner_config=layers)) as engine, Engine(ranked) as twin:
        assert "FP8 kept as stored: 23 tensors" in engine.capacity.notes
        assert any("11 stored linear layers" in note for note in engine.capacity.notes)
        assert engine.capacity.weights_id == twin.capacity.weights_id
        near(await play(engine), await play(twin))
        await engine.update_weights("tensors", named_tensors(load_file(new / SINGLE_FILE)))
        await twin.update_weights("folder", str(new))
        near(await play(engine), await play(twin))
        await engine.update_weights("folder", str(new))
        assert engine.capacity.weights_id == twin.capacity.weights_id
        engine.check()


def near(one: list[Result], other: list[Result]) -> None:
    """The first token's log-prob of every answer, and most rows of its prompt."""
    for a, b in zip(one, other, strict=True):
        (sample,), (twin,) = a.samples, b.samples
        assert sample.logprobs is not None
        assert twin.logprobs is not None
        assert sample.routing is not None
        assert twin.routing is not None
        if sample.token_ids[0] == twin.token_ids[0]:
            assert sample.logprobs[0] == pytest.approx(twin.logprobs[0], abs=0.1)
        prompt = len(a.prompt_token_ids)
        rows = (np.sort(each.routing.array[:prompt], -1) for each in (sample, twin))  # type: ignore[union-attr]
        assert np.equal(*rows).all(-1).mean() > 0.7


@pytest.mark.nightly
async def test_a_model_with_recurrent_layers_keeps_its_experts(tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    shape = {**SIZES, "mlp_only_layers": [], "layer_types": ["linear_attention", "full_attention"]}
    make_fp8(quantised, tmp_path / "plain", "qwen3_next", 0, (128, 128), **shape)
    results = []
    for stored in (True, False):
        async with Engine(config(quantised, stored=stored, num_snapshots=4)) as engine:
            kept = [note for note in engine.capacity.notes if "kept as stored" in note]
            assert len(kept) == stored
            results.append(await play(engine))
    assert_alike(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NOTES)
async def test_the_device_path_answers_as_with_plain_weights(tmp_path: Path, kind: str) -> None:
    """Chunks, late arrivals, penalties, two steps in flight."""
    quantised, _ = make(tmp_path, kind)
    wanted = await answers(quantised, {**DEVICE, "dtype": "bfloat16"}, depth=2)
    kept = {**DEVICE, "dtype": "bfloat16", "quantised_weights": "stored"}
    assert_same(await answers(quantised, kept, depth=2), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NOTES)
async def test_drawn_weights_stay_quantised(tmp_path: Path, kind: str) -> None:
    quantised, _ = make(tmp_path, kind)
    (quantised / SINGLE_FILE).unlink()
    own = {**DEVICE, "weights": "random", "quantised_weights": "stored"}
    async with Engine(config(quantised, runner_config=own)) as engine:
        assert any("drawn weights that stay as stored" in note for note in engine.capacity.notes)
        assert_alike(await play(engine), await play(engine))
