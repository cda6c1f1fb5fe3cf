"""New weights of a group: each rank writes its parts, and what names the whole does not depend on the ranks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import TransformersRunner, named_tensors
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights import identity, loading, update
from rank_play import CONFIG, play
from ranks import as_ranks, returned
from step_driver import Driver

from fdasync.errors import CheckpointError, RunnerError, WeightsBroken, WeightsRejected
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for seed, name in enumerate(("old", "new")):
        make_tiny_checkpoint(tmp_path / name, "qwen3_moe", seed, attention_bias=True)
    return tmp_path / "old", tmp_path / "new"


def on_ranks(ranks: int, folder: Path, work: Callable[[Driver], Awaitable[Any]]) -> list[Any]:
    async def one(exchange: Exchange) -> Any:
        driver = await Driver.open(folder, config=CONFIG, exchange=exchange)
        try:
            return await work(driver)
        finally:
            await driver.close()

    return as_ranks(ranks, lambda exchange: asyncio.run(one(exchange)))


def whole(folder: Path) -> Any:
    return loading.load(loading.read_checkpoint(str(folder)), "float64", torch.device("cpu"))


async def tokens_of(driver: Driver) -> list[int]:
    sequence = driver.sequence(PROMPT, 6)
    await driver.run([sequence])
    return sequence.tokens


async def send(driver: Driver, model: Any, piece: int = 1000) -> None:
    given = named_tensors(model)
    await driver.runner.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in given])
    for number, (_, _, _, buffer) in enumerate(given):
        data = memoryview(buffer)
        for first in range(0, len(data), piece):
            await driver.runner.write_tensor(number, first, data[first : first + piece])
    await driver.runner.end_tensors()


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_folder_and_tensors_from_memory_replace_all_parts(pair: tuple[Path, Path], ranks: int) -> None:
    old, new = pair
    models = {path: whole(path) for path in pair}
    ids = {path: identity.weights_id(model) for path, model in models.items()}

    async def work(driver: Driver) -> dict[str, Any]:
        runner = driver.runner
        seen: dict[str, Any] = {"compared": await runner.read_weights_id(str(new)), "first": await tokens_of(driver)}
        seen["loaded"] = await runner.load_folder(str(new))
        seen["fingerprint"] = await runner.fingerprint_weights(with_tensors=True)
        seen["second"] = await tokens_of(driver)
        # pieces of 125 elements: they end within rows, and within the slices of ranks
        await send(driver, models[old])
        return {**seen, "sent": (await runner.fingerprint_weights()).weights_id, "third": await tokens_of(driver)}

    found = returned(on_ranks(ranks, old, work))
    for seen in found:
        assert seen["compared"] == seen["loaded"] == ids[new]
        assert seen["first"] == seen["third"] == found[0]["first"]
        assert seen["second"] == found[0]["second"] != seen["first"]
    assert found[0]["sent"] == ids[old]
    assert found[0]["fingerprint"] == identity.fingerprint_of(sorted(models[new].state_dict().items()), True)


@pytest.mark.ci
def test_a_rank_that_fails_in_mid_update_breaks_all_and_the_next_update_mends_all(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair
    stream = loading.stream

    async def work(driver: Driver) -> list[Any]:
        runner, rank = driver.runner, driver.runner.limits.rank

        def fails(*args: Any) -> None:
            if rank == 1:
                raise CheckpointError("a.safetensors", "cannot be read")
            stream(*args)

        monkeypatch.setattr(update.loading, "stream", fails)
        with pytest.raises(WeightsBroken) as broken:
            await runner.load_folder(str(new))
        with pytest.raises(RunnerError, match="only a part was replaced"):
            await driver.step()
        monkeypatch.setattr(update.loading, "stream", stream)
        return [str(broken.value), await runner.load_folder(str(new)), await tokens_of(driver)]

    (one,) = play(new)
    for said, weights_id, _ in returned(on_ranks(2, old, work)):
        assert "rank 1 of 2: a.safetensors: cannot be read" in said
        assert weights_id == one.capacity.weights_id


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "torn"), [(2, "model.norm.weight"), (4, "model.layers.1.self_attn.k_proj.weight")])
def test_ranks_that_read_other_bytes_serve_nothing(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, ranks: int, torn: str
) -> None:
    """As where a folder is replaced while its ranks read it: what several ranks hold differs on the last one."""
    old, new = pair
    stream = loading.stream

    async def work(driver: Driver) -> str:
        runner = driver.runner
        assert isinstance(runner, TransformersRunner)

        def tears(*args: Any) -> None:
            stream(*args)
            if runner.limits.rank == ranks - 1:
                runner.model.get_parameter(torn).data.mul_(1.01)

        monkeypatch.setattr(update.loading, "stream", tears)
        with pytest.raises(WeightsBroken) as broken:
            await runner.load_folder(str(new))
        with pytest.raises(RunnerError, match="only a part was replaced"):
            await driver.step()
        monkeypatch.setattr(update.loading, "stream", stream)
        await runner.load_folder(str(new))
        await tokens_of(driver)
        return str(broken.value)

    for said in returned(on_ranks(ranks, old, work)):
        assert f"rank {ranks - 1} of {ranks} has other weights than the ranks before it" in said


@pytest.mark.ci
def test_what_one_rank_rejects_all_reject_and_nothing_changes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    make_tiny_checkpoint(tmp_path / "other", "qwen3_moe", attention_bias=True, moe_intermediate_size=32)

    async def work(driver: Driver) -> list[str]:
        runner, before, said = driver.runner, await tokens_of(driver), []
        # as if rank 1 saw another folder
        seen = tmp_path / "other" if runner.limits.rank else new
        for update_ in (runner.load_folder, runner.read_weights_id):
            with pytest.raises(WeightsRejected) as rejected:
                await update_(str(seen))
            said.append(str(rejected.value))
        shape = (4, 4) if runner.limits.rank else tuple(runner.model.lm_head.weight.shape)
        with pytest.raises(WeightsRejected) as rejected:
            await runner.begin_tensors([TensorMeta("lm_head.weight", "float32", shape)])
        assert await tokens_of(driver) == before
        return [*said, str(rejected.value)]

    for folder, compared, tensors in returned(on_ranks(2, old, work)):
        assert "rank 1 of 2" in folder
        assert "moe_intermediate_size" in folder
        assert "moe_intermediate_size" in compared
        assert "rank 1 of 2: lm_head.weight has shape (4, 4)" in tensors


def test_tensors_of_a_wrong_shape_are_told_with_whole_shapes(pair: tuple[Path, Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    async def work(driver: Driver) -> str:
        with pytest.raises(WeightsRejected) as rejected:
            await driver.runner.begin_tensors([TensorMeta(name, "float32", (32, 32))])
        return str(rejected.value)

    for said in returned(on_ranks(2, pair[0], work)):
        assert said.endswith(f"{name} has shape (32, 32), the config asks for (64, 32)")
