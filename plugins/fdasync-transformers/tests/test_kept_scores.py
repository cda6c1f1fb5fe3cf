"""Log-probs of prompts over cached blocks whose final hidden states are kept: the library's, and only the head runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from device_path import DEVICE, ON_GPU, make_small_checkpoint
from fdasync_transformers.execution.gpu_services import make_services
from fdasync_transformers.execution.parts.kept_scores import KeptScores
from fdasync_transformers.start import bound_runner
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

OWN = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False, "aux": ("final_hidden",)}
PROMPT = [number * 7 % 90 + 3 for number in range(43)]


def config(folder: Path, own: dict[str, Any] = OWN, **values: Any) -> EngineConfig:
    sizes = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 64, "max_running": 6, "max_step_tokens": 32}
    return EngineConfig(
        model=str(folder), runner_config=own, **{"process": "inline", "tokenizer": "none", **sizes, **values}
    )


def asked(start: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "max_tokens": 3,
            "temperature": 0.0,
            "prompt_logprobs_start": start,
            "prompt_top_logprobs": 2 + start % 2,
            **fields,
        }
    )


def check(result: Result, model: Any, start: int, error: float = 2e-4) -> None:
    prompt = list(result.prompt_token_ids)
    with torch.inference_mode():
        table = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1).numpy()
    first = max(start, 1)
    wanted = [table[at - 1, prompt[at]] for at in range(first, len(prompt))]
    found = np.asarray(result.prompt_logprobs)[first - start :]
    np.testing.assert_allclose(found, wanted, atol=error)
    assert result.prompt_top_logprobs is not None
    best = [top.logprobs for top in result.prompt_top_logprobs[first - start :]]
    np.testing.assert_allclose(
        best, [-np.sort(-table[at - 1])[: 2 + start % 2] for at in range(first, len(prompt))], atol=error
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "deepseek_v3"])
async def test_a_hit_is_scored_by_what_is_kept(tmp_path: Path, family: str) -> None:
    """The same prompt again, from every position on; and a longer one."""
    model = make_tiny_checkpoint(tmp_path, family)
    async with Engine(config(tmp_path)) as engine:
        first = await engine.complete(PROMPT, asked())
        check(first, model, 0)
        for start in (0, 1, 5, 8, 39, 40, 41, 42):
            again = await engine.complete(PROMPT, asked(start))
            check(again, model, start)
            assert again.samples[0].token_ids == first.samples[0].token_ids
            assert again.cached.device == 40
        longer = await engine.complete([*PROMPT, 5, 9, 200, 31, 8], asked())
        check(longer, model, 0)
        assert longer.cached.device == 40
        engine.check()


async def test_without_them_a_scored_prompt_is_computed(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, {**OWN, "aux": ()})) as engine:
        for _ in range(2):
            result = await engine.complete(PROMPT, asked(9))
            check(result, model, 9)
        assert result.cached.device == 8


@pytest.mark.parametrize(("depth", "late"), [(1, False), (2, False), (2, True)])
async def test_blocks_that_are_computed_meanwhile(
    tmp_path: Path, depth: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one prompt at once, samples of one, and others beside them; some are preempted. `late`: steps end a
    turn after their launch, as on a GPU, and rows are on their way while the next step is planned."""
    if late:
        monkeypatch.setattr(bound_runner, "make_services", lambda device, **_: make_services(device, by_kernels=True))
    ready, waited = KeptScores.is_ready, []

    def seen(self: KeptScores, plan: Any) -> bool:
        waited.append(not ready(self, plan))
        return not waited[-1]

    monkeypatch.setattr(KeptScores, "is_ready", seen)
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    prompts = [PROMPT, PROMPT, [*PROMPT[:30], 5, 9], [*PROMPT[:17], 8, 2, 6], [9, 4, 4, 8, 1, 7]]
    async with Engine(config(tmp_path, num_blocks=34, pipeline_depth=depth)) as engine:
        work = [engine.complete(one, asked(at % 3, n=1 + at % 2, max_tokens=9)) for at, one in enumerate(prompts)]
        for at, result in enumerate(await asyncio.gather(*work)):
            check(result, model, at % 3)
        stats = engine.stats().scheduler
        assert stats.hit_tokens_device > 40
        assert any(waited) == late
        engine.check()


async def test_fixed_numerics_give_the_bits_of_a_computed_prompt(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, {**OWN, "self_check": True}, numerics="fixed")) as engine:
        first = await engine.complete(PROMPT, asked())
        again = await engine.complete(PROMPT, asked())
        assert again.cached.device == 40
    assert np.array_equal(first.prompt_logprobs, again.prompt_logprobs, equal_nan=True)
    assert first.prompt_top_logprobs == again.prompt_top_logprobs


async def test_they_come_back_with_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory, and from a store, in an engine that begins anew."""
    # a model this small computes faster than any store reads, so the engines get another speed
    monkeypatch.setattr("fdasync_transformers.start.capacity.prefill_tokens_per_s", lambda *_: 1.0)
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    tiers = config(
        tmp_path / "model", num_blocks=16, host_blocks=24, store="file",
        store_config={"path": str(tmp_path / "store")}, fetch_min_tokens=4,
    )  # fmt: skip
    async with Engine(tiers) as engine:
        check(await engine.complete(PROMPT, asked()), model, 0)
        # others take the device's blocks
        await engine.complete([9, *PROMPT[1:40]], asked())
        again = await engine.complete(PROMPT, asked())
        check(again, model, 0)
        assert again.cached.host >= 20
        await engine.drain()
        engine.check()
    async with Engine(msgspec.structs.replace(tiers, host_blocks=24)) as engine:
        again = await engine.complete(PROMPT, asked())
        check(again, model, 0)
        assert again.cached.store > 20


async def test_results_have_them_where_they_are_named(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path)) as engine:
        plain = await engine.complete(PROMPT, asked())
        named = await engine.complete(PROMPT, asked(), aux=["final_hidden"])
    assert not plain.samples[0].aux
    sample = named.samples[0]
    states = sample.aux["final_hidden"]
    tokens = [*PROMPT, *sample.token_ids][:-1]
    with torch.inference_mode():
        wanted = model.model(torch.tensor([tokens])).last_hidden_state[0]
    found = torch.from_numpy(np.ascontiguousarray(states)).view(torch.float32).view(len(tokens), -1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.ci
async def test_on_a_device_too(tmp_path: Path) -> None:
    model = make_small_checkpoint(tmp_path, "qwen3_moe")
    prompt = PROMPT if ON_GPU else PROMPT[:11]
    own = {**OWN, **DEVICE}
    async with Engine(config(tmp_path, own)) as engine:
        for hits in (0, len(prompt) // 4 * 4):
            result = await engine.complete(prompt, asked(max_tokens=2))
            check(result, model, 0, 5e-4)
            assert result.cached.device == hits
