"""Locks on GPUs: one engine at a time, or several that share; gone with their process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fdasync.errors import ConfigError
from fdasync.ipc.gpu_locks import GpuLocks, held_by, holders
from fdasync.ipc.gpus import Gpu, find
from tests.support.gpus import install_gpus

if TYPE_CHECKING:
    from pathlib import Path

_HOLD = """
import sys
from fdasync.ipc.gpu_locks import GpuLocks
from fdasync.ipc.gpus import Gpu
locks = GpuLocks(shares=False)
print(locks.take(Gpu("0", sys.argv[1], "0")), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    install_gpus(tmp_path, monkeypatch, 1)
    return find([0])[0]


def test_one_engine_holds_a_gpu_and_those_that_share_hold_it_together(gpu: Gpu) -> None:
    alone, other = GpuLocks(shares=False), GpuLocks(shares=False)
    sharing = [GpuLocks(shares=True) for _ in range(2)]
    assert alone.take(gpu)
    assert not other.take(gpu)
    assert not sharing[0].take(gpu)
    assert (holders(gpu), held_by(gpu)) == ([os.getpid()], f"this process ({os.getpid()})")
    alone.close()
    alone.close()
    assert holders(gpu) == []
    assert all(one.take(gpu) for one in sharing)
    assert not other.take(gpu)
    sharing[0].close()
    assert not other.take(gpu)
    sharing[1].close()
    assert other.take(gpu)
    other.close()


def test_a_killed_process_leaves_no_lock(gpu: Gpu) -> None:
    locks = GpuLocks(shares=False)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, gpu.key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "True\n"
            assert not locks.take(gpu)
            assert held_by(gpu) == f"process {other.pid}"
        finally:
            other.kill()
        other.wait()
        assert locks.take(gpu)
        locks.close()


def test_a_folder_that_cannot_be_used_is_named(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runtime" / "fdasync-gpus"
    folder.write_text("a file of this name")
    with pytest.raises(ConfigError, match=f"{folder}, for locks, cannot be made: File exists"):
        GpuLocks(shares=False).take(gpu)
    folder.unlink()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="for locks, is another user's"):
        GpuLocks(shares=False).take(gpu)
    # without a runtime folder, one of this user's among temporary files
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    locks = GpuLocks(shares=False)
    assert locks.take(gpu)
    locks.close()
    assert (tmp_path / f"fdasync-gpus-{os.getuid()}" / "0000_10_00.0").exists()
