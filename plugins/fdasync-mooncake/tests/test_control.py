"""The connection to a sender of blocks, against a server of the test's own."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_mooncake.transfer.control import Control, ControlEnded


async def test_a_connection_that_breaks_ends_at_once_what_was_asked_of_it() -> None:
    asked = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked.wait()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        # nothing is given up here for its silence
        control = Control(f"127.0.0.1:{port}", bytes(16), keyed=False, stuck_s=3600.0)
        _, answer = control.ask(())
        asked.set()
        with pytest.raises(ControlEnded, match="broke"):
            await asyncio.wait_for(answer, 60)
        assert control.ended is not None
        assert control.ended.transient
