"""Blocks between the pool and the host's shared memory, and a runner that computes with no half-loaded weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.model.kv import KVLayout, KVPool, LayerSpec
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from safetensors.torch import load_file

from fdasync.cache.host_arena import HostArena
from fdasync.errors import InvariantBroken, RunnerError, WeightsBroken
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.gpu.block_rows import BlockRows
from fdasync.runner.base import RunnerLimits, TensorMeta
from fdasync.testing import on_bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
LAYERS = (LayerSpec(0, 2, 4, 4), LayerSpec(1, 1, 6, 0, latent_rank=4))


def make_pool(dtype: torch.dtype, blocks: int = 6) -> KVPool:
    pool = KVPool(KVLayout(LAYERS, dtype), blocks, 4, CPU)
    # every bit pattern, not-a-numbers included
    noise = np.random.default_rng(1).integers(0, 256, tuple(pool.blocks.view(torch.uint8).shape), np.uint8)
    pool.blocks.view(torch.uint8).copy_(torch.from_numpy(noise))
    return pool


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[HostArena]:
    arena = HostArena.create(5, request.param)
    yield arena
    arena.close()


NBYTES = 4 * (2 * 8 + 6)


@pytest.mark.parametrize(
    ("dtype", "host"), [(torch.float32, 4 * NBYTES), (torch.bfloat16, 2 * NBYTES)], indirect=["host"]
)
def test_blocks_come_back_bit_for_bit_and_only_they_are_touched(dtype: torch.dtype, host: HostArena) -> None:
    pool = make_pool(dtype)
    blocks = pool.blocks.view(torch.uint8)
    before = blocks.clone()
    swap_planner = BlockRows(pool.blocks, host)
    assert swap_planner.out([4, 0, 2], [1, 3, 0]) == 3 * host.block_nbytes
    assert torch.equal(blocks, before)
    for block, place in ((4, 1), (0, 3), (2, 0)):
        assert host.kv[place].tobytes() == before[block].numpy().tobytes()
    # all other bytes, headers and padding included, are still zero
    assert np.count_nonzero(np.frombuffer(host.region.map, np.uint8)) == np.count_nonzero(host.kv[[0, 1, 3]])
    assert swap_planner.back([0, 1], [5, 2]) == 2 * host.block_nbytes
    want = before.clone()
    want[5], want[2] = before[2], before[4]
    assert torch.equal(blocks, want)
    assert swap_planner.out([], []) == swap_planner.back([], []) == 0


@pytest.mark.parametrize("host", [4 * NBYTES + 1], indirect=True)
def test_host_blocks_of_another_size_are_refused(host: HostArena) -> None:
    with pytest.raises(InvariantBroken, match="host blocks have 353 bytes, those of the pool 352"):
        BlockRows(make_pool(torch.float32).blocks, host)


@pytest.mark.parametrize("host", [4 * NBYTES], indirect=True)
@pytest.mark.parametrize(
    ("device", "places"), [([0, 6], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 5]), ([0, 1], [0, -1]), ([0, 1], [0])]
)
def test_blocks_that_do_not_exist_are_refused_before_any_is_copied(
    host: HostArena, device: list[int], places: list[int]
) -> None:
    pool = make_pool(torch.float32)
    before = pool.blocks.view(torch.uint8).clone()
    swap_planner = BlockRows(pool.blocks, host)
    with pytest.raises(InvariantBroken, match=r"does not exist|host blocks"):
        swap_planner.out(device, places)
    assert not host.kv.any()
    with pytest.raises(InvariantBroken, match=r"does not exist|host blocks"):
        swap_planner.back(places, device)
    assert torch.equal(pool.blocks.view(torch.uint8), before)


def make_runner(folder: Path) -> TransformersRunner:
    make_tiny_checkpoint(folder, "qwen3_moe")
    limits = RunnerLimits(model=str(folder), max_running=2, max_step_tokens=64, block_tokens=16, num_blocks=12)
    return TransformersRunner(TransformersConfig(dtype="float32", num_threads=1, self_check=False), limits)


def test_after_a_failed_copy_nothing_is_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with on_bench(make_runner(tmp_path), host_blocks=2) as on:
            with pytest.raises(RunnerError, match="host block 2 does not exist"):
                await on.runner.copy(SwapOut(0, (0,), (2,)))
            with pytest.raises(RunnerError, match="nothing more after a failure"):
                await on.runner.copy(SwapIn(1, (0,), (0,)))
            with pytest.raises(RunnerError, match="nothing more after a failure"):
                await on.runner.launch(RunStep(0))

    asyncio.run(test())


def test_no_step_is_computed_with_weights_that_are_half_loaded(tmp_path: Path) -> None:
    name = "model.norm.weight"

    async def test() -> None:
        async with on_bench(make_runner(tmp_path)) as on:
            runner, prompt = on.runner, on.prompt(5)
            answer = await on.answer(0, prompt, 3, [0])
            own = load_file(tmp_path / "model.safetensors")[name].numpy().tobytes()
            await runner.begin_tensors([TensorMeta(name, "float32", (32,))])
            assert (await on.answer(1, prompt, 3, [0])).tokens == answer.tokens, "nothing was written yet"
            await runner.write_tensor(0, 0, memoryview(own)[:4])
            with pytest.raises(RunnerError, match="only a part was replaced"):
                await on.launch()
            with pytest.raises(WeightsBroken):
                await runner.end_tensors()
            with pytest.raises(RunnerError, match="only a part was replaced"):
                await on.launch()
            await runner.begin_tensors([TensorMeta(name, "float32", (32,))])
            await runner.write_tensor(0, 0, memoryview(own))
            await runner.end_tensors()
            assert (await on.answer(2, prompt, 3, [0])).tokens == answer.tokens

    asyncio.run(test())
