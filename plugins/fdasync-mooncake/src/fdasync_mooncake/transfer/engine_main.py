"""The process of one transfer engine: it has the staging area, no other memory of an instance, and starts nothing.

Mooncake listens on all addresses and asks nobody who they are: who reaches its ports reaches the memory of this process
at most. Calls of the engine are made on the loop: a call that hangs holds a lock that all others need, so a thread
would not help; `engine.py` kills a process that hangs. Transfers that run are polled, with naps in between: the engine
has nothing to wait on, and its waiting calls keep a core busy. Knows no blocks and no requests. `engine.py` starts it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from fdasync.errors import PluginError, ProtocolError, RunnerError
from fdasync.ipc.child import settle
from fdasync.ipc.deadlines import Within
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import remote
from fdasync.ipc.service import Service, serve
from fdasync.ipc.shared_memory import SharedRegion

# uvloop's timers count whole milliseconds, in which a fast network brings ten MB
_NAP_S = 100e-6
# what `send_probe` of the engine says, and hears from another one: length, kind, JSON
_PROBE = b"\x04\0\0\0\0\0\0\0\x03{}\n"
_PROBE_ANSWER = b'\x16\0\0\0\0\0\0\0\x03{"status":"success"}\n'
_GROUP, _NAME = "fdasync.transports", "mooncake"


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The engine runs.

    Attributes:
        port: by which other engines reach it.
        address: of the staging area's first byte in its process.
    """

    port: int
    address: int


class Met(msgspec.Struct, frozen=True, array_like=True):
    """Whether an engine can be read from.

    Attributes:
        problem: why not; "" if it can.
        lasts: nothing between the machines lets a connection through.
    """

    problem: str = ""
    lasts: bool = False


class EngineService(Service):
    """One engine."""

    errors = ErrorTable(RunnerError, PluginError)

    def __init__(self) -> None:
        self._engine: Any = None
        self._staging: SharedRegion | None = None
        self._address = 0
        # transfers that run, by the engine's number
        self._reads: dict[int, asyncio.Future[int]] = {}

    @remote()
    async def start(self, staging: Sequence[SharedRegion], host: str, protocol: str, devices: str) -> Started:
        """Initialise the engine and register the staging area.

        Args:
            staging: the area, one.
            host: the address by which other machines reach this one.
            protocol: "tcp" or "rdma".
            devices: names of RDMA devices, separated by commas; "": all.

        Raises PluginError, RunnerError.
        """
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise PluginError(
                _GROUP, _NAME, "fdasync-mooncake",
                f"its engine cannot be imported: {error}; install one of mooncake-transfer-engine-non-cuda"
                " and mooncake-transfer-engine, never both, and the system library libibverbs1",
            ) from error  # fmt: skip
        (self._staging,) = staging
        nbytes = self._staging.nbytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging.map))
        engine = module.TransferEngine()
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise RunnerError(f"Mooncake's engine does not start at {host} by {protocol} (code {code})")
        code = engine.register_memory(self._address, nbytes)
        if code != 0:
            hint = "; rdma locks memory: see ulimit -l" if protocol == "rdma" else ""
            raise RunnerError(f"Mooncake's engine could not register {nbytes} bytes (code {code}){hint}")
        self._engine = engine
        settle()
        return Started(engine.get_rpc_port(), self._address)

    @remote()
    async def ping(self) -> None:
        """Answer."""

    @remote()
    async def connect(self, segment: str, limit_s: float) -> Met:
        """Get to know another engine, which answers within `limit_s`. Blocks while that engine is stopped."""
        engine = self._started()
        # the engine's own way has no limit worth the name, and holds up all transfers: ask first, and wait here
        problem, lasts = await _probe(segment, limit_s)
        if problem:
            return Met(problem, lasts)
        # blocking: a few round trips; an engine that is stopped just now keeps it, and then this process is killed
        found = engine.get_first_buffer_address(segment)
        return Met("" if found else f"{segment} is no engine with memory")

    @remote()
    async def read(self, segment: str, address: int, offset: int, nbytes: int) -> int:
        """Read another engine's memory into the staging area; returns a code of `engine.py`.

        Args:
            segment: of the other engine, which was connected before.
            address: there.
            offset, nbytes: in the staging area.
        """
        engine = self._started()
        assert self._staging is not None
        if not 0 <= offset <= offset + nbytes <= self._staging.nbytes:
            raise ProtocolError("a read to outside of the staging area")
        # one entry: of a batch the engine looks at the first transfer only
        batch = engine.batch_transfer_async_read(segment, [self._address + offset], [address], [nbytes])
        if not batch:
            return -1
        loop = asyncio.get_running_loop()
        ended = self._reads[batch] = loop.create_future()
        if len(self._reads) == 1:
            loop.call_soon(self._poll)
        return await asyncio.shield(ended)

    def _started(self) -> Any:
        if self._engine is None:
            raise ProtocolError("a call came before the engine was started")
        return self._engine

    def _poll(self) -> None:
        found = [(batch, code) for batch in self._reads if (code := self._engine.transfer_check_status(batch))]
        for batch, code in found:
            # never asked again: the engine has dropped it
            ended = self._reads.pop(batch)
            if not ended.done():
                ended.set_result(code)
        if self._reads:
            if not found:
                time.sleep(_NAP_S)  # blocking: a nap of a process that has nothing else to do
            asyncio.get_running_loop().call_soon(self._poll)

    def otherwise(self, message: Any, problem: str) -> RunnerError:  # noqa: ARG002 - the contract's
        return RunnerError(problem)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        # the process ends with all that it has; the engine's own end takes seconds
        for call in calls:
            call.cancel()


async def _probe(segment: str, limit_s: float) -> tuple[str, bool]:
    """Why the engine with this name does not answer, or "", and whether nothing gets through to it.

    It serves one connection at a time, and waits up to 5 s for the next word or the end of one: so this is a plain
    socket, which is closed when this returns, and not a moment later.
    """
    host, _, port = segment.rpartition(":")
    loop = asyncio.get_running_loop()
    is_through = False
    answer = b""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with Within(limit_s):
                await loop.sock_connect(sock, (host, int(port)))
                is_through = True
                await loop.sock_sendall(sock, _PROBE)
                while len(answer) < len(_PROBE_ANSWER) and (more := await loop.sock_recv(sock, len(_PROBE_ANSWER))):
                    answer += more
        except TimeoutError:
            if is_through:
                return f"{segment} did not answer for {limit_s:g} s", False
            return f"{segment} takes no connection within {limit_s:g} s: see firewalls", True
        except OSError as error:
            return f"{segment} cannot be reached: {error}", False
    return "" if answer == _PROBE_ANSWER else f"{segment} is no engine of Mooncake's", False


def main() -> None:
    """The child's program."""
    # names and units of Mooncake; variables of the operator stay
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "5")
    serve(EngineService())
