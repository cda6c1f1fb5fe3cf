"""Runs the front and its clients as processes, and counts the CPU that each side spends meanwhile.

Knows no figures. Used by `http.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.http.load import COUNTING, Counted, Load
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync_fleet.router.router import Router

_START_S, _END_S = 60.0, 60.0
_CLIENT_S = 120.0
# the count is looked at this long after it began, and as long before its end
_EDGE_S = 0.5
_POLL_S = 0.005


class Front(msgspec.Struct, frozen=True):
    """`fdasync http` that runs: its port and the id of its process."""

    port: int
    pid: int


@contextlib.asynccontextmanager
async def front(address: str, rows: str = "none") -> AsyncIterator[Front]:
    """`fdasync http` in a process of its own over one instance; `rows`: its option of that name."""
    read, write = os.pipe()
    command = ["-m", "fdasync", "http", "--connect", address, "--port", "0", "--rows", rows, "--drain-s", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--ready-fd", str(write), pass_fds=(write,), stdout=asyncio.subprocess.DEVNULL
    )
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            async with Within(_START_S):
                line = await asyncio.to_thread(lines.readline)
        if not line:
            raise RuntimeError("the front did not start")
        yield Front(json.loads(line)["port"], process.pid)
    finally:
        process.terminate()
        async with Within(_END_S):
            await process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has spent, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Cpu(msgspec.Struct, frozen=True):
    """CPU seconds of processes in `wall_s` seconds, and the engine's decode steps meanwhile."""

    wall_s: float
    front_s: float
    engine_s: float
    steps: int

    def since(self, before: Cpu) -> Cpu:
        return Cpu(
            *[a - b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)]
        )


class Meter:
    """Reads the CPU of an instance and of a front, and the instance's steps.

    Args:
        router: sees the instance's heartbeats, which say how many steps it has done.
        engine_pid: of the instance.
    """

    def __init__(self, router: Router, engine_pid: int) -> None:
        self._router = router
        self._engine_pid = engine_pid

    async def read(self, front_pid: int | None) -> Cpu:
        """At the instance's next heartbeat, half a second away at most."""
        before = self._router.stats().instances[0].status_at
        async with Within(_START_S):
            while (instance := self._router.stats().instances[0]).status_at == before:  # noqa: ASYNC110 - it is told of so
                await asyncio.sleep(_POLL_S)
        assert instance.status is not None
        return Cpu(
            asyncio.get_running_loop().time(),
            0.0 if front_pid is None else cpu_s(front_pid),
            cpu_s(self._engine_pid),
            instance.status.totals.steps,
        )


async def run_arm(module: str, at: str, load: Load, meter: Meter, front_pid: int | None) -> tuple[Counted, Cpu]:
    """Run one arm in a process of its own; what it counted, and the CPU that was spent while it did."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.http.{module}", at, msgspec.json.encode(load).decode(),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with Within(_CLIENT_S + load.warm_s + load.count_s):
            if (await process.stdout.readline()).decode().strip() != COUNTING:
                raise RuntimeError(f"{module} counted nothing")
            await asyncio.sleep(_EDGE_S)
            before = await meter.read(front_pid)
            await asyncio.sleep(max(load.count_s - 2 * _EDGE_S - 1.0, 0.5))
            cpu = (await meter.read(front_pid)).since(before)
            out = await process.stdout.readline()
            if await process.wait():
                raise RuntimeError(f"{module} failed")
        return msgspec.json.decode(out, type=Counted), cpu
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def through_front(served: Front, load: Load, meter: Meter) -> tuple[Counted, Cpu]:
    """The arm through the front."""
    return await run_arm("client", str(served.port), load, meter, served.pid)


async def direct(address: str, load: Load, meter: Meter) -> tuple[Counted, Cpu]:
    """The arm of a router's readers."""
    return await run_arm("readers", address, load, meter, None)
