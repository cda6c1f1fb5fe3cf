"""Mooncake's transfer engine in a process of its own, seen from a transport: started, asked, killed, started again.

Neither the instance's process nor the one of its transports has an engine in it. Its process may crash, hang or be
killed at any time: reads of it fail then, when it was reaped, and the next use starts another, at most once a second.
Knows no peers but by the name of their engine. Made by `transport.py`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync.errors import FdasyncError, RunnerError, WorkerStuck
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.rpc import RpcClient
from fdasync_mooncake.transfer.engine_main import EngineService, Met

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.ipc.shared_memory import SharedRegion

NAME = "mooncake engine"
_MODULE = "fdasync_mooncake.transfer.engine_main"
#: what its verbs raise
ENGINE_ERRORS = (FdasyncError, OSError)
#: what `read` answers when all bytes have come
DONE = 1

# it takes 40 ms by tcp; rdma looks at its devices
START_S = 20.0
# an engine that a silent connection keeps answers after 5 s
CONNECT_S = 6.0
_PING_S = 2.0
# Mooncake ends a transfer by itself 5 s after the last byte
READ_S = 15.0
_STOP_S = 2.0
_RESTART_S = 1.0
# an engine whose stop held up another one is left alone for so long
_SHUN_S = 10.0


def protocol_here() -> tuple[str, str, str]:
    """Protocol, devices, and the problem with them, or "": of MOONCAKE_PROTOCOL and MOONCAKE_DEVICE, which Mooncake's
    own tools read; else rdma where the machine has a device for it. Mooncake itself starts with any of them."""
    found = Path("/sys/class/infiniband")
    has_devices = found.is_dir() and any(found.iterdir())  # blocking: sysfs, microseconds
    protocol = os.environ.get("MOONCAKE_PROTOCOL") or ("rdma" if has_devices else "tcp")
    problem = ""
    if protocol not in ("tcp", "rdma"):
        problem = f"MOONCAKE_PROTOCOL is {protocol!r}, not tcp or rdma"
    elif protocol == "rdma" and not has_devices:
        problem = "MOONCAKE_PROTOCOL is 'rdma', and this machine has no device for it in /sys/class/infiniband"
    return protocol, os.environ.get("MOONCAKE_DEVICE", ""), problem


class Engine:
    """See the module.

    Args:
        host: the address by which other machines reach this one.
        staging: the area that it may reach; the caller keeps it until `aclose` has returned.
        on_end: called when its process ended by itself or was killed.

    Attributes:
        protocol: "tcp" or "rdma".
        segment: host:port by which other engines reach it, while it runs.
        address: of the staging area's first byte in its process, while it runs.
        restarts: how often it was started again.
    """

    def __init__(self, host: str, staging: SharedRegion, on_end: Callable[[Exception], None]) -> None:
        self.protocol, self._devices, self._problem = protocol_here()
        self.segment = ""
        self.address = 0
        self.restarts = -1
        self._host = host
        self._staging = staging
        self._on_end = on_end
        self._client: RpcClient | None = None
        self._starting: asyncio.Task[RpcClient] | None = None
        self._started_at = 0.0
        self._closed = False
        self._connecting: dict[str, asyncio.Task[Met]] = {}
        self._connected: set[str] = set()
        self._shunned: dict[str, float] = {}

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none: no number stands for no process in a call that ends processes."""
        return None if self._client is None or self._client.gone.done() else self._client.process.pid

    async def start(self) -> RpcClient:
        """Start it unless it runs; callers at the same time share the start, and cancelling one stops its waiting only.

        Raises PluginError if Mooncake cannot be imported, RunnerError if it does not start or has ended a moment ago,
        WorkerDied, WorkerStuck, OSError.
        """
        if self._closed:
            raise RunnerError("the transport is closed")
        if self._problem:
            raise RunnerError(self._problem)
        if self._client is not None and self._client.ending is None:
            return self._client
        if self._starting is None or self._starting.done():
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(_retrieve)
        return await asyncio.shield(self._starting)

    async def _start(self) -> RpcClient:
        loop = asyncio.get_running_loop()
        if self._client is not None:
            # reaped first, so that the staging area has one engine
            await wait_within([self._client.gone], START_S)
            if loop.time() - self._started_at < _RESTART_S:
                raise RunnerError("Mooncake's engine has ended, and is started again in a moment")
        self._started_at = loop.time()
        self.restarts += 1
        self._connected.clear()
        client = self._client = RpcClient(loop, NAME, _MODULE, EngineService.errors)
        try:
            started = client.call(EngineService.start, [self._staging], self._host, self.protocol, self._devices)
            await wait_within([started], START_S)
            if not started.done():
                await self._kill(client, "its start", START_S)
            found = started.result()  # of a future that is done
        except BaseException as error:
            await client.kill(error if isinstance(error, FdasyncError) else RunnerError("it was not started"))
            raise
        self.segment, self.address = f"{self._host}:{found.port}", found.address
        client.gone.add_done_callback(self._gone)
        return client

    async def check(self) -> None:
        """Raise unless it answers: a receiver's engine must not meet a hanging engine. Raises as `start`."""
        client = await self.start()
        answer = client.call(EngineService.ping)
        await wait_within([answer], _PING_S)
        if not answer.done():
            await self._kill(client, "a ping", _PING_S)
        answer.result()  # of a future that is done

    async def connect(self, segment: str) -> Met:
        """Get to know another engine. Raises as `start`."""
        if segment in self._connected:
            return Met()
        loop = asyncio.get_running_loop()
        self._shunned = {name: until for name, until in self._shunned.items() if until > loop.time()}
        if segment in self._shunned:
            return Met(f"{segment} held up this machine's engine a moment ago")
        if segment not in self._connecting:
            task = self._connecting[segment] = loop.create_task(self._connect(segment))
            task.add_done_callback(lambda _: self._connecting.pop(segment, None))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(self._connecting[segment])

    async def _connect(self, segment: str) -> Met:
        client = await self.start()
        answer = client.call(EngineService.connect, segment, CONNECT_S)
        await wait_within([answer], CONNECT_S + _PING_S)
        if not answer.done():
            self._shunned[segment] = asyncio.get_running_loop().time() + _SHUN_S
            await self._kill(client, f"connecting to {segment}", CONNECT_S + _PING_S)
        met = answer.result()  # of a future that is done
        if not met.problem:
            self._connected.add(segment)
        return met

    async def read(self, segment: str, address: int, offset: int, nbytes: int) -> int:
        """Read another engine's memory into the staging area: `DONE`, or a code of Mooncake's.

        When it has returned nothing is written any more by this read. It must not be cancelled before. Raises as
        `start`.
        """
        client = await self.start()
        answer = client.call(EngineService.read, segment, address, offset, nbytes)
        await wait_within([answer], READ_S)
        if not answer.done():
            await self._kill(client, "a read", READ_S)
        code = answer.result()  # of a future that is done
        if code != DONE:
            # it may be another process by now
            self._connected.discard(segment)
        return code

    async def aclose(self) -> None:
        """End it; reaped on return. Idempotent. Raises DeadlineExceeded where the kernel does not let go of it."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await wait_within([self._starting], START_S)
        if self._client is not None:
            await self._client.close(RunnerError("the transport is closed"), _STOP_S)
        tasks = list(self._connecting.values())
        if tasks:
            await wait_within(tasks, _STOP_S)

    async def _kill(self, client: RpcClient, what: str, limit_s: float) -> None:
        await client.kill(WorkerStuck(NAME, client.process.pid, what, limit_s))

    def _gone(self, gone: asyncio.Future[Exception]) -> None:
        self._connected.clear()
        if not self._closed:
            self._on_end(gone.result())  # of a future that is done


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Asyncio warns of no error whose waiters have all gone."""
    if not task.cancelled():
        task.exception()
