"""Engines of models with recurrent layers: chunked prompts, prefix hits, preemption and swaps give the library's tokens
and rows; sleep keeps nothing that was not on the host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from fdasync_trainer import Served, verify
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GPU = {"device": "cuda"}
# the others' recurrence has no kernel
BY_KERNELS = ("lfm2_moe", "granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid")
OTHERS = ("lfm2_moe", "granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid", "zaya", "minimax")


def config(folder: Path, **values: Any) -> EngineConfig:
    runner = {"dtype": "float32", "device": "cpu", "num_threads": 1, **values.pop("runner_config", {})}
    sizes = {"block_tokens": 4, "num_blocks": 20, "max_running": 4, "max_step_tokens": 24, "max_context_tokens": 72}
    return EngineConfig(
        model=str(folder),
        runner_config=runner,
        tokenizer="none",
        routing=True,
        **{**sizes, "process": "inline", **values},
    )


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    prefix = rng.integers(16, 250, 21).tolist()
    return [(prefix if number % 3 else []) + rng.integers(16, 250, 5 + number * 3).tolist() for number in range(count)]


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_next", *[pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS]])
async def test_hits_preemption_and_swaps_are_exact(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    asked = prompts(9)
    async with Engine(config(tmp_path, host_blocks=64, num_snapshots=10)) as engine:
        assert engine.capacity.state_specs
        results = await asyncio.gather(*[engine.complete(prompt, GREEDY) for prompt in asked])
        # the first ones were evicted to the host, and go on from there
        results += [await engine.complete([*asked[1], *results[1].samples[0].token_ids, 77, 78], GREEDY)]
        engine.check()
        stats = engine.stats().scheduler
    assert stats.preemptions > 0
    assert stats.hit_tokens > 20
    assert stats.hit_tokens_host > 0
    assert stats.resumed_snapshots > 2
    report = verify(tmp_path, [Served.from_result(result) for result in results])
    assert report.ok, report
    assert (report.tokens_equal, report.tokens_wrong) == (12 * len(results), 0)
    assert report.rows_exact == report.rows_checked > 0


@pytest.mark.ci
async def test_kernels_begin_behind_snapshots_of_either_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above by the path of GPUs, in Triton's interpreter: fewer requests, one after the other."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # a layer of each kind: the interpreter takes seconds for each
    both = ["linear_attention", "full_attention"]
    make_tiny_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=2, layer_types=both)
    asked, brief = prompts(3), msgspec.structs.replace(GREEDY, max_tokens=3)
    kernels = {"kernels": "triton", "self_check": False}
    sizes = {"num_blocks": 9, "host_blocks": 32, "num_snapshots": 6}
    async with Engine(config(tmp_path, runner_config=kernels, **sizes)) as engine:
        results = [await engine.complete(prompt, brief) for prompt in (*asked[1:], *asked)]
        engine.check()
        stats = engine.stats().scheduler
    assert stats.hit_tokens > 20
    assert stats.hit_tokens_host > 0
    assert stats.resumed_snapshots > 1
    report = verify(tmp_path, [Served.from_result(result) for result in results])
    assert report.ok, report
    assert report.rows_exact == report.rows_checked > 0


@pytest.mark.nightly
async def test_two_ranks_begin_behind_snapshots_of_either_tier(tmp_path: Path) -> None:
    """Of a state that both have whole, rank 0 alone writes the copy on the host."""
    make_tiny_checkpoint(tmp_path, "qwen3_next")
    asked, brief = prompts(4), msgspec.structs.replace(GREEDY, max_tokens=5)
    ranks = {"tensor_parallel": 2, "process": "worker"}
    async with Engine(config(tmp_path, host_blocks=64, num_snapshots=4, num_blocks=18, **ranks)) as engine:
        results = await asyncio.gather(*[engine.complete(prompt, brief) for prompt in (*asked, *asked[:2])])
        results += [await engine.complete([*asked[1], *results[1].samples[0].token_ids, 77, 78], brief)]
        engine.check()
        stats = engine.stats().scheduler
    assert stats.hit_tokens_host > 0
    assert stats.resumed_snapshots > 1
    assert stats.num_host_snapshots > stats.free_host_snapshots
    report = verify(tmp_path, [Served.from_result(result) for result in results])
    assert report.ok, report
    assert report.tokens_wrong == 0
    assert report.rows_exact == report.rows_checked > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", *[one for one in OTHERS if one in BY_KERNELS]])
async def test_a_gpu_is_exact_with_hits_preemption_and_swaps(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    asked = prompts(9)
    async with Engine(config(tmp_path, runner_config=GPU, host_blocks=64, num_snapshots=10)) as engine:
        results = await asyncio.gather(*[engine.complete(prompt, GREEDY) for prompt in asked])
        results += [await engine.complete([*asked[1], *results[1].samples[0].token_ids, 77, 78], GREEDY)]
        engine.check()
        stats = engine.stats().scheduler
    assert stats.preemptions > 0
    assert stats.hit_tokens > 20
    assert stats.hit_tokens_host > 0
    assert stats.resumed_snapshots > 2
    report = verify(tmp_path, [Served.from_result(result) for result in results])
    assert report.ok, report
    assert report.tokens_wrong == 0
    assert report.rows_exact == report.rows_checked > 0


@pytest.mark.ci
@pytest.mark.parametrize("runner_config", [{}, pytest.param(GPU | {"sleep": True}, marks=pytest.mark.gpu)])
async def test_it_sleeps_and_goes_on(tmp_path: Path, runner_config: dict[str, Any]) -> None:
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    prompt = prompts(3)[2]
    async with Engine(config(tmp_path, num_snapshots=4, runner_config=runner_config)) as engine:
        before = await engine.complete(prompt, GREEDY)
        await engine.sleep()
        await engine.wake()
        after = await engine.complete(prompt, GREEDY)
        assert engine.stats().scheduler.resumed_snapshots == 0
        again = await engine.complete(prompt, GREEDY)
        assert engine.stats().scheduler.resumed_snapshots == 1
        engine.check()
    tokens = [list(result.samples[0].token_ids) for result in (before, after, again)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("host_snapshots", {"store": "memory", "host_blocks": 8, "host_snapshots": 0}),
        ("host_snapshots", {"role": "mixed", "host_snapshots": 0}),
    ],
)
async def test_a_state_has_no_way_to_others_without_a_place_on_the_host(
    tmp_path: Path, field: str, values: dict[str, Any]
) -> None:
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    with pytest.raises(ConfigError) as caught:
        async with Engine(config(tmp_path, **values)):
            pass
    assert caught.value.field == f"config.{field}"
