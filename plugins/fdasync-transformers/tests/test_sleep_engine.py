"""Engines of real checkpoints sleep and wake: memory goes, and what ran goes on with its tokens, rows and log-probs.

On a GPU the same requests run with graphs, and what the driver says is free is looked at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_path import DEVICE, make_small_checkpoint
from fdasync_transformers import named_tensors, weights_fingerprint, write_delta
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import ConfigError, WakeFailed, WeightsDiffer, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def ranks_are_forks(request: pytest.FixtureRequest) -> None:
    """What is asked here is asked of their memory; `test_rank_engine.py` has real processes. A GPU takes no forks."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params["way"] == "ranks":
        request.getfixturevalue("forked_children")


def params(way: str) -> list[SamplingParams]:
    tokens = 5 if way == "kernels" else 16
    return [
        SamplingParams(max_tokens=tokens, temperature=0.0, logprobs="raw"),
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=3, logprobs="raw"),
    ]


def prompt(number: int) -> list[int]:
    return [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 10)]]


def config(folder: Path, way: str, *, sleeps: bool = True, **values: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
    sizes = {"block_tokens": 4, "num_blocks": 32, "max_context_tokens": 64, "max_running": 4, "max_step_tokens": 32}
    place: dict[str, Any] = {"process": "inline"}
    if way == "kernels":
        own |= DEVICE
    elif way == "ranks":
        own |= {"dtype": "float64", "experts": "eager"}
        place = {"tensor_parallel": 2}
    elif way == "gpu":
        own = {"dtype": "float32", "device": "cuda", "self_check": False, "sleep": sleeps}
        place = {"process": "worker"}
    return EngineConfig(
        model=str(folder), runner_config=own, tokenizer="none", host_blocks=32, **{**sizes, **place, **values}
    )


async def play(engine: Engine, way: str) -> list[Result]:
    asked = [engine.complete(prompt(number), one) for number in range(2) for one in params(way)]
    return list(await asyncio.gather(*asked))


def told(results: list[Result]) -> list[Any]:
    """Tokens, rows and log-probs."""
    found = []
    for result in results:
        (sample,) = result.samples
        assert sample.routing is not None
        found.append((list(sample.token_ids), sample.routing.array.tolist(), sample.raw_logprobs))
    return found


def assert_alike(one: list[Any], other: list[Any]) -> None:
    """Log-probs of what was computed again may differ by the order of sums in another batch."""
    for (tokens, rows, scores), (tokens2, rows2, scores2) in zip(one, other, strict=True):
        assert tokens == tokens2
        assert rows == rows2
        assert scores == pytest.approx(scores2, abs=1e-3)


async def begun(engine: Engine, steps: int) -> None:
    """So many more steps were made."""
    async with asyncio.timeout(300):
        before = engine.stats().scheduler.steps
        while engine.stats().scheduler.steps < before + steps:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)


@pytest.mark.ci
@pytest.mark.parametrize("way", ["host", pytest.param("kernels", marks=pytest.mark.nightly), "ranks", GPU])
async def test_what_ran_goes_on_after_a_sleep(tmp_path: Path, way: str) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, way)) as engine:
        wanted = told(await play(engine, way))
        await engine.reset_cache()
        running = asyncio.create_task(play(engine, way))
        await begun(engine, 2)
        for _ in range(1 if way == "kernels" else 2):
            await engine.sleep(1)
            engine.check()
            assert engine.stats().released == ("weights", "kv_cache", "cuda_graph")
            await engine.wake()
            await begun(engine, 1)
        assert_alike(told(await running), wanted)
        assert engine.stats().scheduler.swapped_in_blocks > 0
        await engine.reset_cache()
        assert_alike(told(await play(engine, way)), wanted)
        engine.check()


@pytest.mark.ci
@pytest.mark.parametrize("way", ["host", "ranks", GPU])
async def test_dropped_weights_come_by_an_update_or_from_their_folder(tmp_path: Path, way: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_tiny_checkpoint(old, "qwen3_moe", 0)
    other = make_tiny_checkpoint(new, "qwen3_moe", 1)
    async with Engine(config(old, way)) as engine:
        wanted = told(await play(engine, way))
        await engine.sleep(2)
        await engine.wake(["weights"])
        with pytest.raises(WeightsRejected):
            await engine.update_weights("part", list(named_tensors(other))[:3])
        await engine.update_weights("whole", named_tensors(other))
        await engine.wake(["kv_cache", "cuda_graph"])
        renewed = told(await play(engine, way))
        assert [tokens for tokens, *_ in renewed] != [tokens for tokens, *_ in wanted]
        await engine.update_weights("folder", str(old))
        assert_alike(told(await play(engine, way)), wanted)
        await engine.sleep(2)
        await engine.wake()
        assert_alike(told(await play(engine, way)), wanted)
        # deeper than at first, and then from another folder
        await engine.sleep(1)
        await engine.sleep(2)
        await engine.wake(["weights"])
        await engine.update_weights("other folder", str(new))
        await engine.wake()
        assert_alike(told(await play(engine, way)), renewed)
        engine.check()


@pytest.mark.ci
@pytest.mark.parametrize("way", ["host", pytest.param("ranks", marks=pytest.mark.nightly), GPU])
async def test_a_wake_loads_a_checkpoint_and_its_deltas(tmp_path: Path, way: str) -> None:
    """And not one of them where another is gone: what is there then is no base for a part of the tensors."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = make_tiny_checkpoint(old, "qwen3_moe", 0)
    other = make_tiny_checkpoint(new, "qwen3_moe", 1)
    dtype = "float64" if way == "ranks" else "float32"
    ids, merged = [weights_fingerprint(model, dtype=dtype).weights_id], model.state_dict()
    changed = list(other.state_dict())[:4]
    for number in range(2):
        some = {name: other.state_dict()[name] for name in changed[2 * number : 2 * number + 2]}
        merged |= some
        model.load_state_dict(merged)
        ids.append(weights_fingerprint(model, dtype=dtype).weights_id)
        write_delta(tmp_path / f"delta-{number}", some, base=ids[-2], result=ids[-1])
    async with Engine(config(old, way)) as engine:
        for number in range(2):
            await engine.update_weights(None, str(tmp_path / f"delta-{number}"))
        assert engine.capacity.weights_id == ids[2]
        wanted = told(await play(engine, way))
        await engine.sleep(2)
        assert await engine.wake() == "running"
        assert_alike(told(await play(engine, way)), wanted)
        await engine.sleep(2)
        (tmp_path / "delta-1").rename(tmp_path / "away")
        with pytest.raises(WeightsRejected):
            await engine.wake()
        assert engine.load().doing == "waits_for_weights"
        with pytest.raises(WeightsRejected):
            await engine.update_weights(None, list(named_tensors(other))[:3])
        (tmp_path / "away").rename(tmp_path / "delta-1")
        assert await engine.wake() == "running"
        assert_alike(told(await play(engine, way)), wanted)
        # tensors that are no whole mend nothing after a comparison that failed
        with pytest.raises(WeightsDiffer):
            await engine.update_weights(None, str(new), expected="0" * 32)
        with pytest.raises(WeightsRejected):
            await engine.update_weights(None, list(named_tensors(model))[:3])
        await engine.update_weights(None, named_tensors(model), expected=ids[2])
        assert_alike(told(await play(engine, way)), wanted)
        engine.check()


async def test_the_memory_of_a_cpu_is_freed_and_buffers_stay(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, "host")) as engine:
        wanted = told(await play(engine, "host"))
        runner: Any = engine._runtime.runner
        weights, blocks = runner.model.lm_head.weight, runner.bound.sleep._pool.blocks
        # a tensor that no update brings
        rotary = runner.model.model.rotary_emb.inv_freq
        kept = rotary.clone()
        assert not gone(weights)
        assert not gone(blocks)
        await engine.sleep(1)
        assert gone(blocks)
        assert not gone(weights)
        await engine.sleep(2)
        assert gone(weights)
        await engine.wake(["weights", "kv_cache"])
        assert torch.equal(rotary, kept)
        await engine.wake()
        assert_alike(told(await play(engine, "host")), wanted)
        # closed while it has no memory
        await engine.sleep(2)


def gone(tensor: torch.Tensor) -> bool:
    """Its pages were given back, but for those at its ends, of which others may have a part."""
    page = 4096 // tensor.element_size()
    assert tensor.numel() > 4 * page
    return not tensor.flatten()[page:-page].any()


@pytest.mark.gpu
async def test_the_memory_of_a_gpu_goes_and_a_wake_without_it_says_so(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, "gpu", num_blocks=1 << 17)) as engine:
        pool_nbytes = engine.capacity.num_blocks * engine.capacity.block_nbytes
        wanted = told(await play(engine, "gpu"))
        before, _ = torch.cuda.mem_get_info()
        await engine.sleep(1)
        free, _ = torch.cuda.mem_get_info()
        assert free - before > 0.9 * pool_nbytes
        # another program takes it all
        taken = [torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")]
        with pytest.raises(WakeFailed) as failed:
            await engine.wake(["kv_cache"])
        assert failed.value.part == "kv_cache"
        assert engine.load().asleep
        taken.clear()
        torch.cuda.empty_cache()
        await engine.wake()
        assert_alike(told(await play(engine, "gpu")), wanted)
        engine.check()


@pytest.mark.gpu
async def test_a_gpu_sleeps_only_where_it_was_asked_for(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, "gpu", sleeps=False)) as engine:
        assert "runner_config.sleep" in engine.capacity.no_sleep
        with pytest.raises(ConfigError, match="runner_config"):
            await engine.sleep()
        await play(engine, "gpu")
