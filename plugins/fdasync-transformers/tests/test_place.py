"""Runners that share a machine: which GPU each takes, and how much of the memory that is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import TransformersConfig
from fdasync_transformers.start import capacity
from fdasync_transformers.start.runner_config import device_of, memory_share
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

from fdasync.errors import ConfigError
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
LIMITS = RunnerLimits(max_running=1, max_step_tokens=8)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("instances", "placed"),
    [
        (1, [(0, 1.0)]),
        (2, [(0, 1.0), (1, 1.0)]),
        (3, [(0, 0.5), (1, 1.0), (0, 0.5)]),
        (5, [(0, 1 / 3), (1, 1 / 2), (0, 1 / 3), (1, 1 / 2), (0, 1 / 3)]),
    ],
)
def test_gpus_are_taken_in_turn(instances: int, placed: list[tuple[int, float]]) -> None:
    found = []
    for instance in range(instances):
        config = TransformersConfig(instance=instance, instances=instances)
        device = device_of(config, LIMITS)
        assert device.type == "cuda"
        found.append((device.index, memory_share(config, LIMITS, device)))
    assert found == placed


@pytest.mark.usefixtures("two_gpus")
def test_all_share_a_device_that_was_named() -> None:
    config = TransformersConfig(device="cuda:1", instance=1, instances=4)
    assert memory_share(config, LIMITS, torch.device("cuda", 1)) == 0.25


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_takes_the_gpu_that_the_engine_showed_it_first() -> None:
    limits = RunnerLimits(max_running=1, max_step_tokens=8, tensor_parallel=2, rank=1)
    config = TransformersConfig(instance=1, instances=2)
    assert (device_of(config, limits).index, memory_share(config, limits, device_of(config, limits))) == (0, 1.0)


def test_without_a_gpu_all_share_the_memory_of_the_host() -> None:
    config = TransformersConfig(device="cpu", instance=1, instances=4)
    assert memory_share(config, LIMITS, device_of(config, LIMITS)) == 0.25


@pytest.mark.parametrize(("instance", "instances"), [(1, 1), (-1, 2), (0, 0)])
async def test_numbers_of_no_instance_are_refused(tmp_path: Path, instance: int, instances: int) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, config={"instance": instance, "instances": instances})
    assert caught.value.field == "runner_config.instance"


async def test_blocks_on_a_cpu_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    blocks = []
    # so that memory is what bounds them
    monkeypatch.setattr(capacity, "_free_host_nbytes", lambda: 1 << 20)
    for instances in (1, 2):
        driver = await Driver.open(tmp_path, num_blocks=None, config={"device": "cpu", "instances": instances})
        blocks.append(driver.capacity.num_blocks)
        await driver.close()
    assert blocks[1] == blocks[0] // 2 > 0


@pytest.mark.parametrize(
    ("share", "free_gib", "fits_gib"),
    [
        (1.0, 70, 70),
        # alone on half of it so far, with 10 GiB of its own and a context: what the other has not taken is not its
        (0.5, 69, 40 - 10 - 1),
        # the other was first, and took more than half
        (0.5, 20, 20),
    ],
)
def test_of_a_shared_gpu_what_others_have_not_taken_yet_is_theirs(
    monkeypatch: pytest.MonkeyPatch, share: float, free_gib: int, fits_gib: int
) -> None:
    class Model:
        device = torch.device("cuda", 0)

    class Step:
        model = Model()

    class Opened:
        step_model = Step()

    monkeypatch.setattr(capacity, "_step_peak_nbytes", lambda *_: 3 * GIB)
    monkeypatch.setattr(capacity, "_beside_nbytes", lambda *_: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    opened: Any = Opened()
    limits: Any = None
    assert capacity._free_nbytes(opened, limits, share, 0, 0) == int(fits_gib * GIB * 0.92) - 5 * GIB
