"""Children of `shapes`: each does one thing and ends, within a time limit, and its memory is watched meanwhile.

One more child than is busy is kept, which imports what it needs in the meantime. Knows no figures. Used by
`shapes.py`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from tests.nightly.http.process import memory_of
from tests.nightly.shapes.run import Found

if TYPE_CHECKING:
    from tests.nightly.shapes.child import Spec

_READ_S = 0.02
_MOST_ERRORS = 3000


@dataclass
class _Child:
    process: asyncio.subprocess.Process
    errors: IO[bytes]

    def said(self) -> str:
        """The end of its messages."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-_MOST_ERRORS:]

    async def end(self) -> None:
        """Kill it if it has not ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.errors.close()


class Children:
    """Starts children; `aclose` ends the one that waits."""

    def __init__(self) -> None:
        self._spare: _Child | None = None

    async def do(self, spec: Spec, limit_s: float) -> tuple[Found, int]:
        """What a child found, and by how many bytes its anonymous memory grew, at most, while weights came.

        Raises RuntimeError with the end of its messages where it fails or is not done within `limit_s`.
        """
        child, self._spare = self._spare or await self._start(), None
        try:
            self._spare = await self._start()
            assert child.process.stdin is not None
            child.process.stdin.write(msgspec.json.encode(spec) + b"\n")
            child.process.stdin.close()
            async with asyncio.timeout(limit_s):
                grown = await _watch(child.process)
                status = await child.process.wait()
            if status:
                raise RuntimeError(f"exit status {status}: {child.said()}")
        except TimeoutError:
            raise RuntimeError(f"stopped after {limit_s:.0f} s: {child.said()}") from None
        finally:
            await child.end()
        return _read(spec.out), grown

    async def aclose(self) -> None:
        child, self._spare = self._spare, None
        if child is not None:
            await child.end()

    async def _start(self) -> _Child:
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "tests.nightly.shapes.child")
        return _Child(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=errors), errors)


def _read(path: str) -> Found:
    return msgspec.json.decode(Path(path).read_bytes(), type=Found)


async def _watch(process: asyncio.subprocess.Process) -> int:
    """Read the child's marks until there are no more; the growth of its anonymous memory while weights came."""
    assert process.stdout is not None
    before = most = 0
    loading = False
    line = asyncio.ensure_future(process.stdout.readline())
    try:
        while True:
            # polled: memory has no event
            done, _ = await asyncio.wait([line], timeout=_READ_S if loading else None)
            if loading:
                most = max(most, memory_of([process.pid]).private)
            if not done:
                continue
            text = line.result().decode().strip()
            if not text:
                return max(0, most - before)
            if text == "weights begins":
                before = most = memory_of([process.pid]).private
            loading = text == "weights begins"
            line = asyncio.ensure_future(process.stdout.readline())
    finally:
        line.cancel()
