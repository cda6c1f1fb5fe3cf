"""Locks on GPUs: an engine locks the GPUs that it takes, so that no other engine of this user takes them unawares.

A lock is one on a file of the user's runtime folder. The kernel releases it when the process ends, however that comes.
Engines that share a GPU hold their locks together, and an engine that does not share excludes them all. Locks only;
knows no engine. Called by `runner/group/placement.py` and the command line.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fdasync.errors import ConfigError

if TYPE_CHECKING:
    from fdasync.ipc.gpus import Gpu

_LOCKS = Path("/proc/locks")
_FOLDER = "set XDG_RUNTIME_DIR to a folder of your own"


class GpuLocks:
    """Locks of one engine. Blocks for microseconds.

    Args:
        shares: others that share may hold the same GPUs.
    """

    def __init__(self, *, shares: bool) -> None:
        self._mode = fcntl.LOCK_SH if shares else fcntl.LOCK_EX
        self._fds: list[int] = []

    def take(self, gpu: Gpu) -> bool:
        """Lock a GPU; False where another engine holds it. Raises ConfigError where there can be no lock."""
        path = _file_of(gpu)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # blocking: once, at start
        except OSError as error:
            problem = f"{path} cannot be opened, to lock {gpu}: {error.strerror}"
            raise ConfigError("config.gpus", problem, hint=_FOLDER) from None
        try:
            fcntl.flock(fd, self._mode | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fds.append(fd)
        return True

    def close(self) -> None:
        """Release all; idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def holders(gpu: Gpu) -> list[int]:
    """Ids of the processes that hold a GPU, as far as the kernel tells them."""
    try:
        status = _file_of(gpu).stat()
        lines = _LOCKS.read_text().splitlines()  # blocking: the kernel's memory
    except OSError:
        return []
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # "1: FLOCK  ADVISORY  WRITE 4699 fe:00:3088707 0 EOF"
    fields = [line.split() for line in lines]
    return sorted({int(one[4]) for one in fields if len(one) == 8 and one[1] == "FLOCK" and one[5] == place})


def held_by(gpu: Gpu) -> str:
    """Who holds a GPU, in words."""
    pids = holders(gpu)
    if not pids:
        return "another process"
    if pids == [os.getpid()]:
        return f"this process ({pids[0]})"
    told = ", ".join(f"{pid} (this one)" if pid == os.getpid() else f"{pid}" for pid in pids)
    return f"process{'es' if len(pids) > 1 else ''} {told}"


def _file_of(gpu: Gpu) -> Path:
    return _folder() / re.sub(r"[^\w.-]", "_", gpu.key)


def _folder() -> Path:
    """The folder of this user's locks, made if missing. Raises ConfigError where it is another user's."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    parent = Path(runtime)
    folder = parent / "fdasync-gpus"
    if not os.access(parent, os.W_OK | os.X_OK):
        folder = Path(tempfile.gettempdir()) / f"fdasync-gpus-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)  # blocking: once, at start
        status = folder.lstat()
    except OSError as error:
        problem = f"{folder}, for locks, cannot be made: {error.strerror}"
        raise ConfigError("config.gpus", problem, hint=_FOLDER) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError("config.gpus", f"{folder}, for locks, is another user's", hint=_FOLDER)
    return folder
