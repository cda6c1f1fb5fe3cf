"""`fdasync http` as a process of its own, attacks and streams on it, and how much memory its processes hold.

Called by `fuzz.py`, `attack.py` and the tests of attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_END_S = 60
# of an attack, from its begin to its end
_ATTACK_S = 300
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


@contextlib.asynccontextmanager
async def attack(name: str, port: int) -> AsyncIterator[dict[str, Any]]:
    """An attack of `attacker.py` under way; what it saw is in the dict behind the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.nightly.http.attacker", name, str(port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(_ATTACK_S):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the attack {name} did not begin")
            yield told
            process.stdin.close()
            out, _ = await process.communicate()
        told |= json.loads(out)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stream(port: int, token: int, count: int) -> AsyncIterator[float | None]:
    """Ask for so many tokens as a well-behaved client, again and again; when each event of the answers came, and None
    behind the last one of each. The last event of an answer ends its sample, and has no token."""
    body = {"token_ids": [token] * 8, "stream": True,
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True}}  # fmt: skip
    data = json.dumps(body).encode()
    head = b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            writer.write(head + data)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a well-behaved stream was refused: {answer!r}")
            while b"[DONE]" not in await reader.readuntil(b"\n\n"):
                yield time.monotonic()
            await reader.readuntil(b"0\r\n\r\n")
            yield None
    finally:
        writer.close()


def children_of(pid: int) -> list[int]:
    """Processes below this one."""
    found: list[int] = []
    # it may end meanwhile
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                found += [int(child), *children_of(int(child))]
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
