"""`fdasync http` as a process of its own, for programs that fuzz or attack it; and how much memory its processes hold.

Called by `fuzz.py` and `attack.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_END_S = 60
_KIB = 1024


class Front(NamedTuple):
    """A front that serves.

    Attributes:
        url, port: where it listens.
        pid: of its process; its instances are children of it, or other processes (`--connect`).
    """

    url: str
    port: int
    pid: int


@contextlib.contextmanager
def front(*options: str) -> Iterator[Front]:
    """Start it on a free port, and end it."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "fdasync", "http", "--port", "0", "--ready-fd", str(write), *options]
    process = subprocess.Popen(command, pass_fds=(write,), stdout=subprocess.DEVNULL)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            line = lines.readline()
        if not line:
            raise RuntimeError(f"the front did not start: {' '.join(command)}")
        ready = json.loads(line)
        yield Front(ready["url"], ready["port"], process.pid)
    finally:
        # the second signal ends it at once
        process.terminate()
        process.terminate()
        process.wait(_END_S)


def children_of(pid: int) -> list[int]:
    """Processes below this one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ = [], [pid]
    while open_:
        below = parents.get(open_.pop(), [])
        found += below
        open_ += below
    return found


class Memory(NamedTuple):
    """Of processes together, in bytes.

    Attributes:
        rss: resident.
        private: of it, what is no file and not shared: it grows where something is kept. Arenas of KV are shared
            memory, whose pages become resident as blocks are used for the first time.
    """

    rss: int
    private: int


def memory_of(pids: list[int]) -> Memory:
    """Resident memory of processes, now; those that ended meanwhile have none."""
    rss = private = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            rss += int(fields.get("VmRSS", "0").split()[0]) * _KIB
            private += int(fields.get("RssAnon", "0").split()[0]) * _KIB
    return Memory(rss, private)
