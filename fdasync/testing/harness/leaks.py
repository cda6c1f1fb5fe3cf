"""Finds leaks: of tasks, threads, fds, shared segments and child processes, and of an engine's blocks and requests.

`Resources.now()` lists what this process holds, and `left_since` names the additions since an earlier list.
`check_idle` compares an engine's counters with an idle engine's.

Reads /proc and blocks for microseconds. Called by tests, benchmarks and the pytest plugin, never by an engine.
"""

from __future__ import annotations

import asyncio
import os
import threading  # threads: lists them, starts none
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.engine.engine import Engine


class LeakFound(AssertionError):
    """Something was left behind.

    Attributes:
        left: one line for each thing.
    """

    def __init__(self, left: list[str]) -> None:
        self.left = left
        super().__init__("\n  ".join(["left behind:", *left]))


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds at one moment; each entry has a part that does not repeat.

    Attributes:
        fds: number and target of each open file descriptor.
        threads: names and ids of Python threads but the main one.
        children: process ids of child processes.
        segments: addresses and names of mapped shared memory.
        tasks: names and coroutines of the running loop's tasks but the current one; empty outside of a loop.
    """

    fds: frozenset[tuple[int, str]]
    threads: frozenset[str]
    children: frozenset[int]
    segments: frozenset[str]
    tasks: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        return cls(
            fds=frozenset(_fds()),
            threads=frozenset(
                f"{thread.name} ({thread.ident})"
                for thread in threading.enumerate()
                if thread is not threading.main_thread()
            ),
            children=frozenset(children()),
            segments=frozenset(_segments()),
            tasks=frozenset(_tasks()),
        )

    def left_since(self, before: Resources) -> list[str]:
        """What this list has and the earlier one has not, in words."""
        left = [f"fd {number} -> {target}" for number, target in sorted(self.fds - before.fds)]
        left += [f"thread {name}" for name in sorted(self.threads - before.threads)]
        left += [f"child process {pid}" for pid in sorted(self.children - before.children)]
        left += [f"shared segment {name}" for name in sorted(self.segments - before.segments)]
        left += [f"task {name}" for name in sorted(self.tasks - before.tasks)]
        return left


@contextmanager
def no_leaks() -> Iterator[None]:
    """Raise LeakFound if the block leaves anything behind. A block that raises is not checked."""
    before = Resources.now()
    yield
    left = Resources.now().left_since(before)
    if left:
        raise LeakFound(left)


def check_idle(engine: Engine) -> None:
    """Raise InvariantBroken unless an engine without live requests has every block, slot and place back."""
    engine.check()
    stats = engine.stats()
    scheduler_stats = stats.scheduler
    held = {
        "live samples": stats.live,
        "requests in the frontend": stats.waiting_for_place,
        "steps in flight": stats.steps_in_flight,
        "running sequences": scheduler_stats.running,
        "waiting sequences": scheduler_stats.waiting,
        "blocks that are neither in use, nor idle, nor free": scheduler_stats.num_blocks
        - scheduler_stats.free_blocks
        - scheduler_stats.idle_blocks,
    }
    wrong = [f"{count} {name}" for name, count in held.items() if count]
    if wrong:
        raise InvariantBroken(f"the engine is idle and holds {', '.join(wrong)}")


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (thread / "children").read_text().split()]
        except FileNotFoundError:  # the thread has ended
            continue
    return found


def native_threads() -> list[str]:
    """Names of all threads of this process as the kernel knows them, the main one included."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            names.append((thread / "comm").read_text().strip())
        except FileNotFoundError:
            continue
    return sorted(names)


def _fds() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the fd of this very listing
            continue
        found.append((int(name), target))
    return found


def _segments() -> list[str]:
    maps = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" not in maps and b"/dev/shm/" not in maps:
        # of a process with large libraries the list has thousands of lines
        return []
    lines = maps.decode(errors="replace").splitlines()
    return [line.split()[0] + " " + line.split()[5] for line in lines if "/memfd:" in line or "/dev/shm/" in line]


def _tasks() -> list[str]:
    try:
        current = asyncio.current_task()
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return []
    return [f"{task.get_name()} {task.get_coro()!r}" for task in asyncio.all_tasks(loop) if task is not current]
