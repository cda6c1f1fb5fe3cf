"""GPUs on the command line: lists for one instance and for several, and which instance gets which."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cli_options import options
from fdasync_fleet.cli.local.fleet import plans_for

from fdasync.cli.common.gpus import parse_gpus
from fdasync.cli.common.options import as_typed, engine_config
from fdasync.cli.doctor import _device
from fdasync.engine.config import EngineConfig
from fdasync.engine.engine import Engine
from fdasync.errors import BadInput, ConfigError
from fdasync.ipc.gpu_locks import GpuLocks
from fdasync.ipc.gpus import find
from tests.support.commands import errors
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
    path.write_text('model = "."\ntensor_parallel = 2\ngpus = [0, "GPU-ab"]\nshare_gpus = true\n')
    config = engine_config(options(config_path=path))
    assert (config.gpus, config.share_gpus) == ((0, "GPU-ab"), True)
    assert engine_config(options(config_path=path, gpus=("2,3",))).gpus == (2, 3)
    assert engine_config(options(config_path=path, gpus=("auto",))).gpus == "auto"
    config = engine_config(options(runner="synthetic", gpus=("1",), share_gpus=True))
    assert (config.gpus, config.share_gpus) == ((1,), True)
    with pytest.raises(BadInput, match="has 1 GPU in a list, and --tp is 2"):
        engine_config(options(config_path=path, gpus=("0", "1")))


def test_instances_get_the_gpus_of_their_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, 4)
    config = EngineConfig(model="m", tensor_parallel=2, gpus=(3, 2, 0, uuid_of(1)))
    assert placed(config, prefill=1, decode=1) == [((3, 2), 0, 2), ((0, uuid_of(1)), 0, 2)]
    with pytest.raises(ConfigError, match=r"names 4 GPUs, and 3 instances with tensor_parallel \(--tp\) 2 need 6 GPUs"):
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
    with pytest.raises(ConfigError, match=r"3 instances .* 2 need 6 GPUs, .* sees 5; GPU 1 .*this process"):
        placed(config, mixed=3)
    sharing = EngineConfig(model="m", tensor_parallel=2, share_gpus=True)
    assert placed(sharing, mixed=3) == [((0, 1), 0, 4), ((2, 3), 0, 4), ((4, 0), 0, 4)]
    other.close()
    with pytest.raises(ConfigError, match=r"an instance .* 6 needs 6 GPUs, and this process sees 5"):
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
    assert (told.state, told.found) == ("ok", f"2; GPU 1 (0000:20:00.0) is held by this process ({os.getpid()})")
    locks.close()
    assert os.listdir(tmp_path / "runtime" / "fdasync-gpus")


@pytest.mark.parametrize(
    ("gpus", "counts", "ranks", "field", "words"),
    [
        # count, visible
        (["01"], (2, None), 1, "config.gpus", r"'01' names no GPU \(limit: an index .*an index is a plain number: 1"),
        (["cuda:1"], (2, None), 1, "config.gpus", "'cuda:1' names no GPU .*an index is a plain number: 1"),
        (["\u0661"], (2, None), 1, "config.gpus", "names no GPU .*nvidia-smi -L"),
        (["9" * 5000], (2, None), 1, "config.gpus", "names no GPU .*nvidia-smi -L"),
        (["2"], (2, None), 1, "config.gpus", r"2 is no GPU .* sees 2 \(limit: 0 to 1\); `nvidia-smi -L` lists"),
        (["1"], (1, None), 1, "config.gpus", r"1 is no GPU .* sees 1 \(limit: 0\)"),
        (["0"], (0, None), 1, "config.gpus", r"0 is no GPU .* sees none \(limit: no GPU\); leave .* doctor"),
        (["1"], (2, "1"), 1, "config.gpus", "sees 1, by CUDA_VISIBLE_DEVICES='1' .*by their places in CUDA_VISIBLE"),
        (["0"], (2, ""), 1, "config.gpus", "sees none, by CUDA_VISIBLE_DEVICES='' .*or change it"),
        (["0,0"], (2, None), 2, "config.gpus", r"names GPU 0 \(0000:10:00.0\) twice; each rank takes a GPU of its own"),
        (["0"], (2, None), 2, "config.gpus", r"names 1 GPU, .* is 2 \(limit: 2, one for each rank\); name as many"),
        (["0,1"], (2, None), 1, "config.gpus", r"names 2 GPUs, .* is 1 \(limit: 1\); name one for each rank"),
    ],
)
def test_what_serve_refuses_has_a_way_out(
    gpus: list[str],
    counts: tuple[int, str | None],
    ranks: int,
    field: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_gpus(tmp_path, monkeypatch, counts[0], visible=counts[1])
    with pytest.raises(ConfigError, match=words) as caught:
        Engine(engine_config(options(runner="synthetic", gpus=gpus, tensor_parallel=ranks)))
    error = caught.value
    assert error.field == field
    assert error.hint
    assert error.limit is not None or "twice" in error.problem


@pytest.mark.parametrize("gpus", ["0", "01", "all", "0,1"])
def test_a_text_in_a_file_is_no_list(gpus: str) -> None:
    for make in (
        lambda: EngineConfig.from_mapping({"runner": "synthetic", "gpus": gpus}),
        lambda: EngineConfig(runner="synthetic", gpus=gpus).validate(),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"is '.*', and no list \(limit: \"auto\", or such as \[0, 1\]"):
            make()


def test_errors_speak_of_the_options_that_were_typed() -> None:
    device = ConfigError("config.runner_config.device", "is 'cuda:1', and config.tensor_parallel is 2")
    gpus = ConfigError("config.gpus", "names 1 GPU, and config.tensor_parallel is 2", hint="see tensor_parallel (--tp)")
    assert as_typed(gpus, ["serve"]) == str(gpus)
    assert as_typed(gpus, ["serve", "--gpus=0", "--tp", "2"]).startswith("--gpus: names 1 GPU, and --tp is 2")
    assert as_typed(gpus, ["up", "--gpus", "0"]).startswith("--gpus: names 1 GPU, and config.tensor_parallel is 2")
    assert as_typed(device, ["serve", "--device", "cuda:1"]).startswith("--device: is 'cuda:1', and config.tensor_par")
    # an option whose name begins so is another
    assert as_typed(gpus, ["up", "--gpus-of=0", "--tpx"]) == str(gpus)


def test_the_command_prints_them_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = errors(capsys, monkeypatch, "serve", "--listen", "ipc:///x", "--runner", "synthetic", "--gpus", "01")
    assert "bad input: --gpus: '01' names no GPU (limit: an index from 0" in told
