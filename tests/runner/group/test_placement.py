"""Engines whose worker processes take GPUs: what the workers see, what is refused, and when the GPUs are free again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import ConfigError, EngineFailed
from fdasync.ipc.gpu_locks import holders
from fdasync.ipc.gpus import find
from fdasync.runner.group.placement import Placement
from fdasync.runner.plugins import make_runner
from fdasync.testing import synthetic_config
from tests.support.gpus import install_gpus, uuid_of

_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def config_of(ranks: int = 1, **values: Any) -> EngineConfig:
    return synthetic_config(process="worker", tensor_parallel=ranks, **values)


def environment(pid: int) -> dict[str, str]:
    """Of a process that runs, as it was started."""
    told = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in told if variable)


@pytest.fixture
def gpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many as the parameter says, and CUDA_VISIBLE_DEVICES."""
    count, visible = request.param
    install_gpus(tmp_path, monkeypatch, count, visible=visible)


@pytest.mark.ci
@pytest.mark.parametrize("gpus", [(4, "3,1,0")], indirect=True)
@pytest.mark.usefixtures("gpus")
async def test_each_rank_starts_with_its_own_gpu_first() -> None:
    own = dict(os.environ)
    async with Engine(config_of(2, gpus=(2, 1))) as engine:
        assert engine.gpus == ("2", "1")
        first, second = [await asyncio.to_thread(environment, pid) for pid in engine.worker_pids]
        assert first["CUDA_VISIBLE_DEVICES"] == f"{uuid_of(0)},{uuid_of(1)}"
        assert second["CUDA_VISIBLE_DEVICES"] == f"{uuid_of(1)},{uuid_of(0)}"
        assert first["CUDA_DEVICE_ORDER"] == second["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert _MULTICAST.items() <= first.items() & second.items()
        assert [holders(gpu) for gpu in find([0, 1, 2])] == [[], [os.getpid()], [os.getpid()]]
        # another engine of this process, and of its own GPUs
        with pytest.raises(ConfigError, match=r"GPU 1 \(0000:20:00.0\) is held by this process \(\d+\).*--share-gpus"):
            await Engine(config_of(gpus=(1,))).start()
        async with Engine(config_of(gpus=(0,))) as other:
            (pid,) = other.worker_pids
            assert (await asyncio.to_thread(environment, pid))["CUDA_VISIBLE_DEVICES"] == uuid_of(3)
    assert engine.gpus == ()
    assert dict(os.environ) == own, "this process's own environment is as it was"
    assert [holders(gpu) for gpu in find([0, 1, 2])] == [[], [], []]


@pytest.mark.ci
@pytest.mark.parametrize("gpus", [(1, "0")], indirect=True)
@pytest.mark.usefixtures("gpus")
async def test_workers_see_what_this_process_sees_where_none_are_placed() -> None:
    async with Engine(config_of(2)) as engine:
        assert engine.gpus == ()
        for pid in engine.worker_pids:
            told = await asyncio.to_thread(environment, pid)
            assert told["CUDA_VISIBLE_DEVICES"] == "0"
            assert _MULTICAST.items() <= told.items()
    assert holders(find([0])[0]) == []


@pytest.mark.ci
@pytest.mark.parametrize("gpus", [(1, None)], indirect=True)
@pytest.mark.usefixtures("gpus")
async def test_a_failed_engine_lets_go_of_its_gpus() -> None:
    with pytest.raises(EngineFailed):  # noqa: PT012 - it fails while it is open
        async with Engine(config_of(gpus=(0,))) as engine:
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=200))
    assert holders(find([0])[0]) == []
    # one whose start fails, as well
    config = config_of(gpus=(0,), num_blocks=1 << 22, host_blocks=1 << 40)
    with pytest.raises(ConfigError, match="host_blocks"):
        await Engine(config).start()
    assert holders(find([0])[0]) == []


def test_auto_takes_the_first_that_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 4)
    one, other, third = (Placement("auto", ranks, shares=False) for ranks in (2, 1, 2))
    other._named = find([1])
    other.take()
    one.take()
    assert [gpu.name for gpu in one.gpus] == ["0", "2"]
    with pytest.raises(
        ConfigError, match=r"--tp\) 2 needs 2 GPUs.* sees 4; GPU 0 .*held by this process \(\d+\); GPU 1 .*GPU 2"
    ):
        third.take()
    # what it had taken by then is free again
    assert holders(find([3])[0]) == []
    one.close()
    third.take()
    assert [gpu.name for gpu in third.gpus] == ["0", "2"]
    for placement in (other, third):
        placement.close()
    with pytest.raises(ConfigError, match=r"--tp\) 5 needs 5 GPUs, and this process sees 4; lower tensor_parallel"):
        Placement("auto", 5, shares=False).take()


def test_auto_takes_none_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 0)
    placement = Placement("auto", 2, shares=False)
    placement.take()
    assert (placement.gpus, placement.environments()) == ((), [{}, {}])
    with pytest.raises(ConfigError, match=r"0 is no GPU that this process sees: it sees none .*--device cpu"):
        Engine(config_of(gpus=(0,)))
    (tmp_path / "dev" / "dxg").touch()
    with pytest.raises(ConfigError, match="which GPUs there are cannot be read here"):
        placement.take()


def test_only_groups_of_the_transformers_runner_take_gpus_unasked() -> None:
    def takes(ranks: int, **values: Any) -> bool:
        return EngineConfig(model="m", tensor_parallel=ranks, **values).places_gpus

    assert takes(2)
    assert takes(2, runner_config={"device": "cuda"})
    assert takes(1, gpus=(0,))
    assert not takes(1)
    assert not takes(2, runner_config={"device": "cpu"})
    assert not takes(2, runner="synthetic")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": ()}, "names no GPU, and config.tensor_parallel is 1"),
        ({"gpus": (0,), "tensor_parallel": 2}, "names 1 GPU, and config.tensor_parallel is 2"),
        ({"gpus": (0, 1)}, "names 2 GPUs, and config.tensor_parallel is 1"),
        ({"gpus": (0, "GPU-00"), "tensor_parallel": 2}, r"names GPU 0 \(0000:10:00.0\) twice, as 'GPU-00' too"),
        ({"gpus": (2,)}, "2 is no GPU that this process sees: it sees 2"),
        ({"gpus": ("cuda:0",)}, "'cuda:0' names no GPU"),
        ({"gpus": (0,), "process": "inline"}, "is set, and config.process is 'inline'"),
        ({"gpus": (0,), "runner_config": {"device": "cpu"}}, "is set, and config.runner_config.device is 'cpu'"),
        ({"tensor_parallel": 2, "runner_config": {"device": "cuda:1"}}, "each rank has its own GPU"),
        ({"gpus": "all"}, "config.gpus"),
        ({"gpus": (True,)}, "config.gpus"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    values: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpus(tmp_path, monkeypatch, 2)
    with pytest.raises(ConfigError, match=words):
        Engine(EngineConfig(**{"runner": "synthetic", "process": "worker", **values}))


def test_a_runner_object_takes_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 2)
    config = config_of(gpus=(0,))
    runner = make_runner(config.runner, config.runner_config, config.runner_limits())
    with pytest.raises(ConfigError, match="a runner object was given"):
        Engine(config, runner=runner)


@pytest.mark.parametrize("gpus", [(4, "3,1,0")], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_workers_that_read_others_devices_see_them_behind_their_own() -> None:
    placement = Placement((1, 0), 2, shares=False, sees_all=True)
    placement.take()
    try:
        told = [environment["CUDA_VISIBLE_DEVICES"] for environment in placement.environments()]
        assert told == [f"{uuid_of(1)},{uuid_of(3)},{uuid_of(0)}", f"{uuid_of(3)},{uuid_of(1)},{uuid_of(0)}"]
    finally:
        placement.close()
