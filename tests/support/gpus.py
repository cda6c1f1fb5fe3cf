"""A machine with GPUs, as the driver's files tell of it: they are made in a folder, and read as on a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.ipc import gpus

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def uuid_of(number: int) -> str:
    return f"GPU-{number}{number}aa0000-0000-0000-0000-000000000000"


def address_of(number: int) -> str:
    return f"0000:{16 * (number + 1):02x}:00.0"


def install_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, *, visible: str | None = None, known: bool = True
) -> None:
    """Have so many GPUs, and a runtime folder of one's own for locks.

    Args:
        visible: this process's CUDA_VISIBLE_DEVICES; None: not set.
        known: whether the driver knows their UUIDs; it does not before it has used a GPU.
    """
    proc, dev, runtime = folder / "proc", folder / "dev", folder / "runtime"
    for one in (proc, dev, runtime):
        one.mkdir(parents=True)
    for number in range(count):
        place = proc / address_of(number)
        place.mkdir()
        uuid = uuid_of(number) if known else "GPU-????????-????-????-????-????????????"
        (place / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\nBus Location: \t {address_of(number)}\n"
            f"Device Minor: \t {number}\nGPU Excluded:\t No\n"
        )
        (dev / f"nvidia{number}").touch()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (dev / name).touch()
    monkeypatch.setattr(gpus, "_PROC", proc)
    monkeypatch.setattr(gpus, "_DEV", dev)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
