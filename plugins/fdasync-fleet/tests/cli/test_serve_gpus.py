"""Instances that take GPUs: what `serve` and `up` refuse, what they say, and that a killed one leaves no lock."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fdasync.ipc.gpu_locks import holders
from fdasync.ipc.gpus import find
from tests.support.commands import children, command, config_file, errors, is_running, wait_for
from tests.support.gpus import install_gpus, uuid_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.support.commands import Running

# of every process that a test starts: its machine is that of the test
_SITE = """
from pathlib import Path
from fdasync.ipc import gpus
gpus._PROC, gpus._DEV = Path({proc!r}), Path({dev!r})
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Three GPUs, for this process and those that it starts."""
    install_gpus(tmp_path / "machine", monkeypatch, 3)
    site = tmp_path / "site"
    site.mkdir()
    folders = {name: str(tmp_path / "machine" / name) for name in ("proc", "dev")}
    (site / "sitecustomize.py").write_text(_SITE.format(**folders))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    yield tmp_path
    for gpu in find(range(3)):
        wait_for(lambda gpu=gpu: not holders(gpu), f"the release of {gpu}")  # type: ignore[misc]


def serve(folder: Path, name: str, config: Path, *arguments: str) -> AbstractContextManager[Running]:
    out = folder / f"of-{name}"
    out.mkdir()
    listen = ("--listen", f"ipc://{folder}/{name}", "--name", name)
    return command(out, "serve", "--config", str(config), *listen, *arguments)


@pytest.mark.ci
def test_two_instances_do_not_take_one_gpu(machine: Path) -> None:
    config = config_file(machine, {"kv_shares": 2}, process="worker")
    with serve(machine, "m0", config, "--tp", "2", "--gpus", "1,0") as first:
        said = first.until(r"GPUs 1, 0: processes (\d+), (\d+)")
        seen = [
            dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if one)
            for pid in said.groups()
        ]
        assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == [
            f"{uuid_of(1)},{uuid_of(0)}", f"{uuid_of(0)},{uuid_of(1)}",
        ]  # fmt: skip
        with serve(machine, "m1", config, "--gpus", "0") as second:
            assert second.wait() == 2
        assert f"--gpus: GPU 0 (0000:10:00.0) is held by process {first.process.pid}" in second.text
        assert len(second.text.splitlines()) == 1, second.text
        with serve(machine, "m2", config, "--gpus", "0", "--share-gpus") as third:
            # both must share
            assert third.wait() == 2
        first.signal(signal.SIGKILL)
        first.wait()
        wait_for(lambda: not any(is_running(int(pid)) for pid in said.groups()), "the end of its workers")
        with serve(machine, "m3", config, "--gpus", "0", "--share-gpus") as fourth:
            fourth.until("GPUs 0: processes")
            with serve(machine, "m4", config, "--gpus", uuid_of(0), "--share-gpus") as fifth:
                fifth.until("GPUs 0: processes")
                for running in (fourth, fifth):
                    running.signal(signal.SIGTERM)
                    assert running.wait() == 0, running.text


@pytest.mark.ci
def test_instances_of_up_have_their_own_and_have_them_again_after_a_restart(machine: Path) -> None:
    config = config_file(machine, process="worker")
    arguments = ("up", "--config", str(config), "--mixed", "2")
    with command(machine, *arguments, "--gpus", "2", "--gpus", "0") as running:
        running.until("m0 has GPUs 2")
        running.until("m1 has GPUs 0")
        pids = children(running.process.pid)
        assert [holders(gpu) for gpu in find(range(3))] == [[pids["m1"]], [], [pids["m0"]]]
        os.kill(pids["m0"], signal.SIGKILL)
        wait_for(lambda: holders(find([2])[0]) not in ([], [pids["m0"]]), "another process in its place")
        assert holders(find([2])[0]) == [children(running.process.pid)["m0"]]
        running.signal(signal.SIGTERM)
        running.wait()
    assert "m0 (mixed) was ended by SIGKILL; it is started again" in running.text


def test_instances_of_up_that_overlap_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, machine: Path
) -> None:
    config = config_file(machine, process="worker")
    arguments = ("up", "--config", str(config), "--prefill", "1", "--decode", "1")
    told = errors(capsys, monkeypatch, *arguments, "--gpus", f"0,{uuid_of(0)}")
    assert "p0 and d0 both take GPU 0 (0000:10:00.0)" in told
    table = machine / "up.json"
    table.write_text(json.dumps({**json.loads(config.read_text()), "gpus": [0]}))
    told = errors(capsys, monkeypatch, "up", "--config", str(table), "--mixed", "2")
    assert "names 1 GPU, and 2 instances " in told
    assert "need 2 GPUs (limit: 2)" in told
