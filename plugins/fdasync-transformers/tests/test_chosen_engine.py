"""Engines of models whose indexers pick positions tell them by request: those that the library's own indexers pick in
one pass over the sample, whatever chunks, hits, preemption, swaps, drafts and processes did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from draft_results import Known
from fdasync_transformers.model.indexers import EarliestOfEquals, find_indexers
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result, Sample


def config(folder: Path, **values: Any) -> EngineConfig:
    runner = {"dtype": "float32", "device": "cpu", "num_threads": 1, **values.pop("runner_config", {})}
    sizes = {"block_tokens": 4, "num_blocks": 24, "max_running": 4, "max_step_tokens": 24, "max_context_tokens": 72}
    own: dict[str, Any] = {"process": "inline", **sizes, **values}
    return EngineConfig(model=str(folder), runner_config=runner, tokenizer="none", **own)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    prefix = rng.integers(16, 250, 21).tolist()
    return [(prefix if number % 3 else []) + rng.integers(16, 250, 5 + number * 3).tolist() for number in range(count)]


def choosing(start: int = 0, **fields: Any) -> SamplingParams:
    values = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(chosen_positions_start=start, **values)


def picked_of(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """What each indexer of the library picks in one pass, [T, k]; of equal scores the earliest."""
    found: list[torch.Tensor] = []
    hooks = [
        indexer.module.register_forward_hook(lambda _module, _args, output: found.append(output[0]))
        for indexer in find_indexers(model)
    ]
    with torch.inference_mode(), EarliestOfEquals():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def check(model: Any, prompt: tuple[int, ...], sample: Sample, start: int) -> None:
    """Raise AssertionError unless the sample has all rows, and those of the library."""
    told = sample.chosen_positions
    assert told is not None
    tokens = [*prompt, *sample.token_ids][:-1]
    assert told.layer_ids == tuple(indexer.layer for indexer in find_indexers(model))
    assert (told.start, told.array.dtype) == (start, np.int32)
    assert told.array.shape == (len(tokens) - start, len(told.layer_ids), model.config.index_topk)
    for layer, picked in enumerate(picked_of(model, tokens)):
        for position in range(start, len(tokens)):
            row = told.array[position - start, layer].tolist()
            # the library fills a row with positions that the token does not see
            want = {at for at in picked[position].tolist() if at <= position}
            count = min(position + 1, model.config.index_topk)
            assert set(row[:count]) == want
            assert len(want) == count
            assert row[count:] == [-1] * (len(row) - count)


def check_all(model: Any, results: list[Result], starts: list[int]) -> None:
    for result, start in zip(results, starts, strict=True):
        for sample in result.samples:
            check(model, result.prompt_token_ids, sample, start)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "dots3_note_text"])
async def test_positions_are_those_of_the_library(tmp_path: Path, family: str) -> None:
    model = make_tiny_checkpoint(tmp_path, family)
    async with Engine(config(tmp_path, host_blocks=48)) as engine:
        asked, starts = prompts(8), [0, 3, 4, 0, 12, 0, 17, 25]
        calls = [engine.complete(prompt, choosing(start)) for prompt, start in zip(asked, starts, strict=True)]
        results = await asyncio.gather(*calls)
        # its blocks are cached
        results.append(await engine.complete(asked[2], choosing(9)))
        engine.check()
        stats = engine.stats().scheduler
    assert stats.preemptions > 0
    assert stats.swapped_in_blocks > 0
    assert results[-1].cached_tokens == 8
    check_all(model, results, [*starts, 9])


@pytest.mark.ci
async def test_drafts_and_samples_have_their_own_rows(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "deepseek_v32")
    asked, params = prompts(2), choosing(2, n=2, temperature=1.0, seed=4, max_tokens=20)
    async with Engine(config(tmp_path)) as engine:
        plain = await asyncio.gather(*[engine.complete(prompt, params) for prompt in asked])
    answers = {
        np.array(prompt, "<i4").tobytes(): [sample.token_ids for sample in result.samples]
        for prompt, result in zip(asked, plain, strict=True)
    }
    drafts = Speculation(drafter="known", max_tokens=3, budget=False)
    known = Known(answers, DrafterLimits.of(3, 2, 4))
    async with Engine(config(tmp_path, speculation=drafts, num_blocks=40), drafter=known) as engine:
        results = list(await asyncio.gather(*[engine.complete(prompt, params) for prompt in asked]))
        stats = engine.stats().scheduler
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        engine.check()
    for result, before in zip(results, plain, strict=True):
        assert [one.token_ids for one in result.samples] == [one.token_ids for one in before.samples]
        assert len({one.token_ids for one in result.samples}) == 2
    check_all(model, results, [2, 2])


@pytest.mark.ci
async def test_a_worker_writes_what_the_engine_reads(tmp_path: Path, forked_children: None) -> None:
    model = make_tiny_checkpoint(tmp_path, "glm_moe_dsa")
    own = {"self_check": False}
    async with Engine(config(tmp_path, process="worker", runner_config=own)) as engine:
        asked = prompts(3)
        results = list(await asyncio.gather(*[engine.complete(prompt, choosing(1)) for prompt in asked]))
        engine.check()
    check_all(model, results, [1, 1, 1])


async def test_a_model_without_indexers_is_not_asked(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, runner_config={"self_check": False})) as engine:
        with pytest.raises(BadInput, match="has no indexers"):
            await engine.complete([1, 2, 3], choosing())
