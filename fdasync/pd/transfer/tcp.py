"""The transport over TCP: the receiver requests runs of bytes, the sender replies from its regions.

Loopback only, since links are not authenticated yet. Both sides use non-blocking sockets and the loop's readers and
writers, so that bytes go from region to kernel to region without other copies. A receiver has one connection to each
sender; it dials at the first receive, and at the next one after the connection broke. `tcp_wire.py` is the protocol,
`tcp_server.py` the sender's side, `tcp_client.py` the receiver's. Knows no messages. Made by `transports.py`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar

from fdasync.errors import BadInput, InvariantBroken, ProtocolError
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync.pd.messages import Source
from fdasync.pd.transfer.base import Transport
from fdasync.pd.transfer.tcp_client import Connection, TcpTransfer
from fdasync.pd.transfer.tcp_server import Server
from fdasync.pd.transfer.tcp_wire import parse_address
from fdasync.pd.transfer.transfers import Transfers
from fdasync.pd.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    TOKEN_NBYTES,
    Offers,
    boot_id,
    broken,
    check_copy_specs,
    check_source,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.transfer.base import CopySpec
    from fdasync.pd.transfer.transfers import Transfer


class TcpTransport(Transport):
    """See the module.

    Args:
        host: loopback address to listen on, in numbers.
        token: token of its source, 16 random bytes; None: drawn.
        stuck_s: a connection that owes bytes and does not move for so long is dropped.
        idle_s: a connection without receives for so long is closed.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self, host: str = "127.0.0.1", token: bytes | None = None, *, stuck_s: float = 5.0, idle_s: float = 60.0
    ) -> None:
        """Raises BadInput for an address that is not loopback."""
        try:
            self._host, _ = parse_address(f"[{host}]:1" if ":" in host else f"{host}:1")
        except ProtocolError as error:
            raise BadInput("host", error.problem, hint="leave it out to listen on 127.0.0.1") from None
        self._token = token or os.urandom(TOKEN_NBYTES)
        self._stuck_s = stuck_s
        self._idle_s = idle_s
        self._server: Server | None = None
        self._source: Source | None = None
        self._closed = False
        self._regions: Sequence[SharedRegion] = ()
        self._transfers = Transfers()
        self._offers = Offers()
        self._connections: dict[tuple[bytes, str], Connection] = {}
        self._timer: DeadlineTimer | None = None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        if self._server is not None or self._closed:
            raise InvariantBroken("a transport is opened once")
        loop = asyncio.get_running_loop()
        machine = boot_id()
        self._offers.open(regions)
        self._server = Server(loop, self._host, self._token, regions, self._offers, self._stuck_s)
        sizes = tuple([(region.fd, region.nbytes) for region in regions])
        self._source = Source(machine, os.getpid(), sizes, self._token, self._server.address)
        self._regions = regions
        self._sweep()

    def source(self) -> Source:
        if self._source is None or self._closed:
            raise InvariantBroken("only an open transport has a source")
        return self._source

    def offer(self, parts: Sequence[Part]) -> None:
        self._offers.add(parts)

    def withdraw(self, parts: Sequence[Part]) -> None:
        self._offers.remove(parts)

    def forget(self, source: Source) -> None:
        if check_source(source):
            return
        self._transfers.end(FORGOTTEN, source.token)
        for key in [key for key in self._connections if key[0] == source.token]:
            self._connections.pop(key).drop()

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        self._transfers.end(CLOSED)
        while self._connections:
            self._connections.popitem()[1].drop(CLOSED)
        await self._transfers.idle()
        self._regions = ()

    async def receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        if self._server is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(copy_specs)
        problem = check_source(source)
        if problem:
            return [refused(problem)] * len(copy_specs)
        transfer = self._transfers.start(source.token, deadline)
        try:
            outcomes = await check_copy_specs(source, copy_specs, self._regions)
            if None in outcomes and not transfer.check():
                await self._carry(transfer, source, TcpTransfer(transfer, copy_specs, outcomes, self._regions))
        finally:
            self._transfers.finish(transfer)
        return [outcome or transfer.over or LATE for outcome in outcomes]

    async def _carry(self, transfer: Transfer, source: Source, tcp_transfer: TcpTransfer) -> None:
        """Return when every outcome is known, or the transfer is over."""
        connection = self._connection(source)
        if not isinstance(connection, Connection):
            transfer.end(connection)
            return
        try:
            connection.add(tcp_transfer)
            while not tcp_transfer.finished and not transfer.check():
                await transfer.wait(transfer.deadline)
        finally:
            connection.remove(tcp_transfer)

    def _connection(self, source: Source) -> Connection | Outcome:
        """The connection to a sender, dialled if there is none; or why that fails."""
        key = (source.token, source.address)
        found = self._connections.get(key)
        if found is not None and not found.closed:
            return found
        try:
            made = Connection(asyncio.get_running_loop(), source.address, source.token)
        except ProtocolError as error:
            return refused(error.problem)
        except OSError as error:
            return broken(f"{source.address} cannot be dialled: {error}")
        self._connections[key] = made
        return made

    def _sweep(self) -> None:
        """Drop connections that are stuck, close idle ones; a timer repeats it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._server is not None:
            self._server.sweep(now)
        for key, connection in list(self._connections.items()):
            since = connection.idle_since()
            if connection.stuck(now, self._stuck_s):
                connection.drop(broken(f"{key[1]} owes bytes and sent none for {self._stuck_s:g} s"))
            elif since is not None and now - since > self._idle_s:
                connection.drop()
            if connection.closed:
                del self._connections[key]
        period_s = min(self._stuck_s, self._idle_s) / 4
        # a DeadlineTimer: a loop that was blocked reads its sockets first
        self._timer = DeadlineTimer(loop, loop.time() + period_s, self._sweep)
