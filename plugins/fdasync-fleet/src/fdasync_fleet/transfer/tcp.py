"""The transport over TCP: the receiver requests runs of bytes, the sender replies from its regions.

Loopback only, unless links have keys. The token of its source is a secret that the link hands over; a process without
the token hears nothing (`tcp_wire.py`). Unless this side asks for TLS (`tcp_tls.py`), blocks are neither secret nor
tamper-proof on their way, though their checksums come by the link. Both sides use non-blocking sockets and the loop's
readers and writers, so that bytes go from region to kernel to region without other copies. A receiver has one
connection to each sender; it dials at the first receive, and at the next one after the connection broke. `tcp_wire.py`
is the protocol, `tcp_server.py` the sender's side,
`tcp_client.py` the receiver's. Knows no messages. Made by `transports.py` and instances.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar

from fdasync.errors import BadInput, ProtocolError
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.endpoint import Endpoint
from fdasync_fleet.transfer.tcp_client import Connection, TcpTransfer, unreached
from fdasync_fleet.transfer.tcp_server import Server
from fdasync_fleet.transfer.tcp_tls import ServerTls
from fdasync_fleet.transfer.tcp_wire import is_tls, parse_address, socket_name
from fdasync_fleet.transfer.validation import (
    CLOSED,
    boot_id,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer


class TcpTransport(Endpoint):
    """See the module.

    Args:
        host: address to listen on, in numbers; loopback, unless `keyed`.
        token: token of its source, 16 random bytes; None: drawn.
        stuck_s: a connection that owes bytes and does not move for so long is dropped.
        idle_s: a connection without receives for so long is closed.
        keyed: links are authenticated and encrypted (`link/keys.py`), so senders may be on other machines.
        said_host: what receivers dial in place of `host`, in numbers; "": `host`, which then does not stand for all
            interfaces.
        port: port to listen on; 0: any.
        tls: blocks travel by TLS 1.3, both ways: a sender whose address is without it is refused. A side that does not
            ask for it speaks it with a sender that does.
    """

    name: ClassVar[str] = "tcp"
    takes_host: ClassVar[bool] = True
    _regions: Sequence[SharedRegion]

    def __init__(
        self,
        host: str = "127.0.0.1",
        token: bytes | None = None,
        *,
        stuck_s: float = 5.0,
        idle_s: float = 60.0,
        keyed: bool = False,
        tls: bool = False,
        said_host: str = "",
        port: int = 0,
    ) -> None:
        """Raises BadInput for an address that is malformed, or not loopback without keys; ConfigError for TLS
        without the package that makes certificates."""
        if said_host and not keyed:
            raise BadInput("said_host", "is for links with keys, which other machines have")
        try:
            self._said_host, _ = parse_address(socket_name(said_host or host, 1), keyed=keyed)
        except ProtocolError as error:
            raise BadInput("host", error.problem, hint="leave it out to listen on 127.0.0.1") from None
        self._host = host
        self._port = port
        super().__init__(token)
        self._stuck_s = stuck_s
        self._keyed = keyed
        self._tls = ServerTls() if tls else None
        self._idle_s = idle_s
        self._server: Server | None = None
        self._connections: dict[tuple[bytes, str], Connection] = {}
        self._timer: DeadlineTimer | None = None

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._check_new()
        loop = asyncio.get_running_loop()
        machine = boot_id()
        self._offers.open(regions)
        self._server = Server(
            loop, self._host, self._token, regions, self._offers, self._stuck_s, self._tls, self._port
        )
        sizes = tuple([(region.fd, region.nbytes) for region in regions])
        self._source = Source(
            machine=machine,
            pid=os.getpid(),
            regions=sizes,
            token=self._token,
            address=self._server.address_at(self._said_host),
        )
        self._regions = regions
        self._sweep()

    def _drop(self, token: bytes) -> None:
        for key in [key for key in self._connections if key[0] == token]:
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

    async def _copy(
        self, transfer: Transfer, source: Source, copy_specs: Sequence[CopySpec], outcomes: list[Outcome | None]
    ) -> None:
        connection = self._connection(source)
        if not isinstance(connection, Connection):
            transfer.end(connection)
            return
        tcp_transfer = TcpTransfer(transfer, copy_specs, outcomes, self._regions)
        try:
            connection.add(tcp_transfer)
            while not tcp_transfer.finished and not transfer.check():
                await transfer.wait(transfer.deadline)
        finally:
            connection.remove(tcp_transfer)

    def _connection(self, source: Source) -> Connection | Outcome:
        """The connection to a sender, dialled if there is none; or why that fails."""
        if self._tls is not None and not is_tls(source.address):
            return refused(
                f"blocks of {source.address} travel in clear, and this side encrypts: set encrypt_blocks on both"
            )
        key = (source.token, source.address)
        found = self._connections.get(key)
        if found is not None and not found.closed:
            return found
        try:
            made = Connection(asyncio.get_running_loop(), source.address, source.token, keyed=self._keyed)
        except ProtocolError as error:
            return refused(error.problem)
        except OSError as error:
            return unreached(source.address, self._said_host, error)
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
                connection.drop_stuck(self._stuck_s)
            elif since is not None and now - since > self._idle_s:
                connection.drop()
            if connection.closed:
                del self._connections[key]
        period_s = min(self._stuck_s, self._idle_s) / 4
        # a DeadlineTimer: a loop that was blocked reads its sockets first
        self._timer = DeadlineTimer(loop, loop.time() + period_s, self._sweep)
