"""`fdasync http` as a process of its own, with its engine as a child. Called by `conftest.py`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_S, END_S = 300.0, 300.0


@asynccontextmanager
async def front(*options: str) -> AsyncIterator[str]:
    """The URL at which it serves. It is told to end when the block is left, and must end well."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fdasync", "http", "--port", "0", "--drain-s", "2", "--ready-fd", str(write), *options,
        stderr=asyncio.subprocess.PIPE, pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    reader = asyncio.StreamReader()
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
    try:
        async with asyncio.timeout(START_S):
            line = await reader.readline()
        assert line, (await process.communicate())[1].decode()
        yield json.loads(line)["url"]
        process.terminate()
        async with asyncio.timeout(END_S):
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
    finally:
        transport.close()
        if process.returncode is None:
            process.kill()
            await process.communicate()
