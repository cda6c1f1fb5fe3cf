"""A TCP relay between an instance and the processes that dial it, which can stall, cut and refuse. Loopback only.

Each instance has a proxy, at an address that outlives its processes. Knows no protocol. Used by `node.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any


class _End(asyncio.Protocol):
    """One side of a connection; the bytes that it reads go to the other side."""

    def __init__(self, proxy: Proxy, other: _End | None) -> None:
        self.proxy = proxy
        self.other = other
        self.transport: Any = None
        self.inbound = other is None
        self._early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.proxy.ends.add(self)
        if self.other is None:
            if self.proxy.refuses or not self.proxy.target:
                transport.abort()
                return
            self.proxy.connect(self)
        else:
            other, self.other.other = self.other, self
            for data in other._early:
                transport.write(data)
            other._early.clear()
        self.apply()

    def apply(self) -> None:
        """Stop or resume reading, as the proxy's stalls say."""
        if self.transport is None or self.transport.is_closing():
            return
        stalled = self.proxy.stalls_in if self.inbound else self.proxy.stalls_out
        if stalled and self.transport.is_reading():
            self.transport.pause_reading()
        elif not stalled and not self.transport.is_reading():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        elif not self.other.transport.is_closing():
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.ends.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Proxy:
    """See the module.

    Attributes:
        port: where it listens.
        target: the instance's port; 0 while there is no process.
        stalls_in, stalls_out: bytes to the instance, or from it, lie still.
        refuses: every new connection is aborted.
        ends: of all connections.
    """

    def __init__(self) -> None:
        self.port = self.target = 0
        self.stalls_in = self.stalls_out = self.refuses = False
        self.ends: set[_End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, None), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def connect(self, end: _End) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, end: _End) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(5.0):
                await loop.create_connection(lambda: _End(self, end), "127.0.0.1", self.target)
        except OSError:
            end.abort()

    def stall(self, inward: bool, outward: bool) -> None:
        self.stalls_in, self.stalls_out = inward, outward
        for end in list(self.ends):
            end.apply()

    def cut(self) -> int:
        """End every connection; returns their number."""
        ends = list(self.ends)
        for end in ends:
            end.abort()
        return len(ends) // 2

    def cut_one(self, choice: float) -> None:
        """End one connection."""
        ends = sorted((end for end in self.ends if end.inbound), key=id)
        if ends:
            ends[int(choice * len(ends))].abort()

    async def aclose(self) -> None:
        self.refuses = True
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        self.cut()
        await asyncio.sleep(0.05)
        await self._server.wait_closed()
