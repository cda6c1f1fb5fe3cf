"""Records what a runner's process does, as torch's profiler sees it. Knows no model. Called by `runner.py`."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

from fdasync.errors import BadInput, RunnerError

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Profiling:
    """The profiles of one process, one at a time."""

    def __init__(self) -> None:
        self._is_recording = False

    async def record(self, folder: Path, rank: int, seconds: float, device: torch.device) -> str:
        """Record operators for so long, and kernels of a GPU; write a compressed trace of Chrome's format into a folder
        that is made; returns the folder.

        Writing blocks the loop, some seconds for a second of work. Cancelling ends the recording. Raises BadInput while
        another one runs, RunnerError where the file cannot be written.
        """
        if self._is_recording:
            raise BadInput("profile", "one is being recorded already", hint="wait for its end")
        self._is_recording = True
        try:
            _make(folder)
            recorded = await _recorded(seconds, device)
            _write(recorded, folder / f"rank-{rank}.json.gz")
        except (OSError, RuntimeError) as error:
            raise RunnerError(f"a profile cannot be written to {folder}: {error}") from error
        finally:
            self._is_recording = False
            _drop_if_empty(folder)
        return str(folder)


async def _recorded(seconds: float, device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # it says that events are read once, which they are. Those that are kept for reading in Python cost seconds
    with warnings.catch_warnings(action="ignore"):
        recorded = profile(activities=activities)
        recorded.start()
    try:
        await asyncio.sleep(seconds)
    finally:
        with warnings.catch_warnings(action="ignore"):
            recorded.stop()
    return recorded


# blocking, all three: a worker's loop, which has nothing else than steps to do


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _write(recorded: profile, path: Path) -> None:
    recorded.export_chrome_trace(str(path))


def _drop_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
