"""GPUs on the command line: lists for one instance and for several, and which instance gets which."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from fdasync.cli.common.gpus import parse_gpus
from fdasync.cli.common.options import engine_config
from fdasync.cli.doctor import _device
from fdasync.cli.local.fleet import plans_for
from fdasync.engine.config import EngineConfig
from fdasync.errors import BadInput, ConfigError
from fdasync.ipc.gpu_locks import GpuLocks
from fdasync.ipc.gpus import find
from tests.cli.test_serve import options
from tests.support.gpus import install_gpus, uuid_of

if TYPE_CHECKING:
    from pathlib import Path


def placed(config: EngineConfig, **counts: int) -> list[Any]:
    """GPUs of each instance, and what its runner is told of the others."""
    plans = plans_for(config, counts)  # type: ignore[arg-type]
    told = [plan.config.runner_config for plan in plans]
    return [(plan.config.gpus, one["instance"], one["instances"]) for plan, one in zip(plans, told, strict=True)]


def test_lists_are_read() -> None:
    assert parse_gpus([]) == (None, 0)
    assert parse_gpus(["auto"]) == ("auto", 0)
    assert parse_gpus(["0, 1", "GPU-ab,MIG-c"]) == ((0, 1, "GPU-ab", "MIG-c"), 2)
    for texts in (["0,"], [""], ["0", "auto"]):
        with pytest.raises(BadInput, match="is no list of GPUs"):
            parse_gpus(texts)
    with pytest.raises(BadInput, match="'0,1' and '2' differ in length"):
        parse_gpus(["0,1", "2"])


def test_options_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('model = "a"\ntensor_parallel = 2\ngpus = [0, "GPU-ab"]\nshare_gpus = true\n')
    config = engine_config(options(config_path=path))
    assert (config.gpus, config.share_gpus) == ((0, "GPU-ab"), True)
    assert engine_config(options(config_path=path, gpus=("2,3",))).gpus == (2, 3)
    assert engine_config(options(config_path=path, gpus=("auto",))).gpus == "auto"
    config = engine_config(options(runner="synthetic", gpus=("1",), share_gpus=True))
    assert (config.gpus, config.share_gpus) == ((1,), True)
    with pytest.raises(BadInput, match="has 1 GPUs in a list, and --tp is 2"):
        engine_config(options(config_path=path, gpus=("0", "1")))


def test_instances_get_the_gpus_of_their_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 4)
    config = EngineConfig(model="m", tensor_parallel=2, gpus=(3, 2, 0, uuid_of(1)))
    assert placed(config, prefill=1, decode=1) == [((3, 2), 0, 2), ((0, uuid_of(1)), 0, 2)]
    with pytest.raises(ConfigError, match="names 4 GPUs, and 3 instances of 2 each take 6"):
        placed(config, prefill=1, decode=2)
    config = EngineConfig(model="m", tensor_parallel=2, gpus=(0, 1, 2, uuid_of(1)))
    with pytest.raises(ConfigError, match=r"p0 and d0 both take GPU 1 \(0000:20:00.0\).*--share-gpus"):
        placed(config, prefill=1, decode=1)
    # each of two instances on one GPU takes half of its memory
    config = EngineConfig(model="m", gpus=(0, 1, 0), share_gpus=True)
    assert placed(config, mixed=3) == [((0,), 0, 2), ((1,), 0, 2), ((0,), 0, 2)]
    config = EngineConfig(model="m", gpus=(0, 1), runner_config={"device": "cuda"})
    assert placed(config, mixed=2) == [((0,), 0, 1), ((1,), 0, 1)]


def test_groups_get_the_next_that_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 5, visible="4,3,2,1,0")
    config = EngineConfig(model="m", tensor_parallel=2)
    other = GpuLocks(shares=True)
    assert other.take(find([1])[0])
    assert placed(config, prefill=1, decode=1) == [((0, 2), 0, 2), ((3, 4), 0, 2)]
    with pytest.raises(ConfigError, match=r"6 GPUs are needed, and this process sees 5; GPU 1 .*process this one"):
        placed(config, mixed=3)
    sharing = EngineConfig(model="m", tensor_parallel=2, share_gpus=True)
    assert placed(sharing, mixed=3) == [((0, 1), 0, 4), ((2, 3), 0, 4), ((4, 0), 0, 4)]
    other.close()
    with pytest.raises(ConfigError, match="6 GPUs are needed, and this process sees 5"):
        placed(EngineConfig(model="m", tensor_parallel=6, share_gpus=True), mixed=1)
    # nothing stays locked: the instances lock their own
    locks = GpuLocks(shares=False)
    assert all(locks.take(gpu) for gpu in find(range(5)))
    locks.close()


def test_without_groups_runners_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path / "one", monkeypatch, 2)
    assert placed(EngineConfig(model="m"), mixed=3) == [("auto", 0, 3), ("auto", 1, 3), ("auto", 2, 3)]
    config = EngineConfig(model="m", tensor_parallel=2, runner_config={"device": "cpu"})
    assert placed(config, mixed=2) == [("auto", 0, 2), ("auto", 1, 2)]
    install_gpus(tmp_path / "none", monkeypatch, 0)
    assert placed(EngineConfig(model="m", tensor_parallel=2), mixed=2) == [("auto", 0, 2), ("auto", 1, 2)]


def test_the_doctor_says_which_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 2)
    locks = GpuLocks(shares=False)
    assert locks.take(find([1])[0])
    told = _device()
    assert (told.state, told.found) == ("ok", "2; GPU 1 (0000:20:00.0) is held by process this one")
    locks.close()
    assert os.listdir(tmp_path / "runtime" / "fdasync-gpus")
