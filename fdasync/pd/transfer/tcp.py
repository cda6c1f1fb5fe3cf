"""The transport over TCP: the receiver asks, the sender answers from its regions, both without copies of their own.

Loopback only: links are not authenticated yet. Both sides work on raw non-blocking sockets and the loop's readers and
writers, so that bytes go from region to kernel to region. A receiver dials when it first needs to, has one connection
to each sender, and dials again at the next receive after it broke. Wire: `tcp_wire.py`; sides: `tcp_server.py`,
`tcp_client.py` and `tcp_job.py`. Knows no messages. Made by whoever runs an instance.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar

from fdasync.errors import BadInput, InvariantBroken, ProtocolError
from fdasync.ipc.deadlines import DeadlineTimer
from fdasync.pd.messages import Source
from fdasync.pd.transfer.base import Transport
from fdasync.pd.transfer.tcp_client import Connection
from fdasync.pd.transfer.tcp_job import Job
from fdasync.pd.transfer.tcp_server import Server
from fdasync.pd.transfer.tcp_wire import parse_address
from fdasync.pd.transfer.transfers import Calls
from fdasync.pd.transfer.validation import (
    CLOSED,
    FORGOTTEN,
    LATE,
    TOKEN_NBYTES,
    Offers,
    boot_id,
    broken,
    check_receipts,
    check_source,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync.pd.transfer.base import Receipt
    from fdasync.pd.transfer.transfers import Call


class TcpTransport(Transport):
    """See the module.

    Args:
        host: loopback address to listen on, in numbers.
        token: of its source, 16 random bytes; drawn unless given.
        stuck_s: a connection that owes something and does not move is dropped after so many seconds.
        idle_s: a connection that nobody needs is closed after so many seconds.
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
        self._calls = Calls()
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
        self._calls.end(FORGOTTEN, source.token)
        for key in [key for key in self._connections if key[0] == source.token]:
            self._connections.pop(key).drop()

    async def aclose(self) -> None:
        self._closed = True
        self._offers.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        self._calls.end(CLOSED)
        while self._connections:
            self._connections.popitem()[1].drop(CLOSED)
        await self._calls.idle()
        self._regions = ()

    async def receive(self, source: Source, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        if self._server is None and not self._closed:
            raise InvariantBroken("a transport receives when it is open")
        if self._closed:
            return [CLOSED] * len(receipts)
        problem = check_source(source)
        if problem:
            return [refused(problem)] * len(receipts)
        call = self._calls.start(source.token, deadline)
        try:
            outcomes = await check_receipts(source, receipts, self._regions)
            if None in outcomes and not call.check():
                await self._carry(call, source, Job(call, receipts, outcomes, self._regions))
        finally:
            self._calls.finish(call)
        return [outcome or call.over or LATE for outcome in outcomes]

    async def _carry(self, call: Call, source: Source, job: Job) -> None:
        """Until every outcome is known, or the call is over."""
        connection = self._connection(source)
        if not isinstance(connection, Connection):
            call.end(connection)
            return
        try:
            connection.add(job)
            while not job.finished and not call.check():
                await call.wait(call.deadline)
        finally:
            connection.remove(job)

    def _connection(self, source: Source) -> Connection | Outcome:
        """The one to this sender, dialled if there is none; or why there is none."""
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
        """Drop what is stuck, close what is idle; again and again, by a timer."""
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
        # a loop that was blocked reads first what came meanwhile
        self._timer = DeadlineTimer(loop, loop.time() + period_s, self._sweep)
