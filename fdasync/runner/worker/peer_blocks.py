"""Blocks from device to device, by a worker process.

Descriptors of the pools do not fit into an answer, so the worker sends them through a socket that comes with the
request. Knows no blocks. `proxy.py` makes the engine's side; `main.py` calls `show`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.errors import RunnerError
from fdasync.ipc.peers.blocks import BlockPull, Exported, PeerBlocks, PoolExport
from fdasync.ipc.remote import Fd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
#: most processes of an instance, as many as descriptors fit into a message
MAX_POOLS = 16


class WorkerPeerBlocks(PeerBlocks):
    """See the module.

    Args:
        send: calls a method of the worker; the future ends with its answer.
        show_pool: calls the one that sends the descriptors of its pools through a socket.
    """

    def __init__(
        self, send: Callable[..., asyncio.Future[Any]], show_pool: Callable[[Fd], asyncio.Future[Sequence[PoolExport]]]
    ) -> None:
        self._send = send
        self._show_pool = show_pool

    async def export(self) -> Exported:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            pools = await _whole(self._show_pool(Fd(theirs.fileno())))
            if not pools:
                raise RunnerError("its blocks cannot be read by other processes")
            try:
                # blocking: it has come, before the answer
                _, fds, _, _ = socket.recv_fds(ours, 1, MAX_POOLS, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise RunnerError(f"the pool's descriptors did not come: {error}") from error
        if len(fds) != len(pools):
            for fd in fds:
                os.close(fd)
            raise RunnerError(f"{len(fds)} descriptors came for {len(pools)} pools")
        return Exported(tuple(pools), tuple(fds))

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[Fd]) -> None:
        await _whole(self._send(PeerBlocks.open, source, pools, fds))

    async def close_source(self, source: bytes) -> None:
        await _whole(self._send(PeerBlocks.close_source, source))

    def pull(self, pull: BlockPull) -> asyncio.Future[list[int]]:
        return self._send(PeerBlocks.pull, pull)

    def sums(self, blocks: Sequence[int]) -> asyncio.Future[list[int]]:
        return self._send(PeerBlocks.sums, blocks)


async def _whole(answer: asyncio.Future[T]) -> T:
    """Wait for the answer even when cancelled, so that the caller knows what is mapped. The death of the worker ends
    it."""
    cancelled: asyncio.CancelledError | None = None
    while not answer.done():
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return answer.result()  # it is done


async def show(peers: PeerBlocks, socket_fd: int) -> tuple[PoolExport, ...]:
    """The worker's side: send the descriptors through the socket, whose fd stays the caller's; returns the pools."""
    exported = await peers.export()
    try:
        with socket.socket(fileno=os.dup(socket_fd)) as sock:
            # blocking: the pair is empty, so the kernel takes it at once
            socket.send_fds(sock, [b"p"], list(exported.fds))
    except OSError as error:
        raise RunnerError(f"the pool's descriptors cannot be sent: {error}") from error
    finally:
        for fd in exported.fds:
            os.close(fd)
    return exported.pools
