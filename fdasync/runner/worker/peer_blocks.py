"""Blocks from device to device, by a worker process: the calls of `PeerBlocks` as messages.

Descriptors of the pools do not fit into an answer, so the worker sends them through a socket that comes with the
request. Knows no blocks. `proxy.py` makes the engine's side; `main.py` calls `show`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import RunnerError
from fdasync.ipc.peer_blocks import BlockPull, Exported, PeerBlocks, PoolExport
from fdasync.runner.worker.messages import CloseSource, OpenSource, ShowPool, SumBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: most processes of an instance, as many as descriptors fit into a message
MAX_POOLS = 16
_POOLS = msgspec.msgpack.Decoder(tuple[PoolExport, ...])
_SUMS = msgspec.msgpack.Decoder(list[int])
_NOTHING = msgspec.msgpack.Decoder(None)


class WorkerPeerBlocks(PeerBlocks):
    """See the module.

    Args:
        send: sends a message with fds to the worker, and decodes the answer; fds stay open until it has come.
    """

    def __init__(self, send: Callable[[Any, msgspec.msgpack.Decoder[Any], Sequence[int]], asyncio.Future[Any]]) -> None:
        self._send = send

    async def export(self) -> Exported:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            # cancelled or not, the fd stays open until the answer has come
            answer = self._send(ShowPool(), _POOLS, (theirs.fileno(),))
            pools: tuple[PoolExport, ...] = await _whole(answer)
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
        return Exported(pools, tuple(fds))

    async def open(self, source: bytes, pools: Sequence[PoolExport], fds: Sequence[int]) -> None:
        await _whole(self._send(OpenSource(source, tuple(pools)), _NOTHING, fds))

    async def close_source(self, source: bytes) -> None:
        await _whole(self._send(CloseSource(source), _NOTHING, ()))

    def pull(self, pull: BlockPull) -> asyncio.Future[list[int]]:
        return self._send(pull, _SUMS, ())

    def sums(self, blocks: Sequence[int]) -> asyncio.Future[list[int]]:
        return self._send(SumBlocks(tuple(blocks)), _SUMS, ())


async def _whole(answer: asyncio.Future[Any]) -> Any:
    """Wait for the answer even when cancelled: descriptors are in use until then. The death of the worker ends it."""
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
