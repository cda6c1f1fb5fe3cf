"""Hands the descriptors of an instance's pools to other instances of the machine, over a Unix socket.

The socket's abstract name is made of the transport's token, so a kill leaves no file behind. Every process of the
machine can connect to it, or take the name when its owner is gone: so each end asks the kernel for the user of the
other. A connection gets one message, with the descriptors on it, and is closed. Knows no blocks. Called by `device.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from fdasync.ipc.peers.blocks import Exported, PoolExport

if TYPE_CHECKING:
    from fdasync_fleet.transfer.transfers import Transfer

#: most descriptors of a message
MAX_POOLS = 16
_MAX_NBYTES = 1 << 16
_BACKLOG = 64
# a full queue, or a lack of descriptors, is tried again after this time
_AGAIN_S = 0.05
_CREDENTIALS = struct.Struct("3i")
_POOLS = msgspec.msgpack.Decoder(tuple[PoolExport, ...])


class Door:
    """The sender's side. `exported` is the caller's, and open until `close`. Raises OSError."""

    def __init__(self, token: bytes, exported: Exported) -> None:
        self._fds = list(exported.fds)
        self._message = msgspec.msgpack.encode(exported.pools)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(_name(token))
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._again: asyncio.TimerHandle | None = None
        self.listen()

    def listen(self) -> None:
        """Answer callers, until `close` or `pause`."""
        self._again = None
        asyncio.get_running_loop().add_reader(self._listener, self._answer)

    def pause(self) -> None:
        """Leave callers in the kernel's queue."""
        asyncio.get_running_loop().remove_reader(self._listener)

    def _answer(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # no descriptors are left just now
            self.pause()
            # bare timer: listen again
            self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self.listen)
            return
        # the socket is new and its buffer empty: the kernel takes a message at once, or the caller is gone
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            if _is_ours(sock):
                socket.send_fds(sock, [self._message], self._fds)

    def close(self) -> None:
        """Answer no more; idempotent."""
        if self._listener.fileno() < 0:
            return
        self.pause()
        if self._again is not None:
            self._again.cancel()
        self._listener.close()


async def knock(call: Transfer, token: bytes) -> Exported:
    """The pools behind a token, and their descriptors, the caller's. The caller ends `call`, or cancels, to stop it.

    Raises OSError where no process of our user answers, ValueError for an answer that cannot be read.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        while call.check() is None:
            try:
                sock.connect(_name(token))
                break
            except BlockingIOError:
                # the sender's queue is full
                await call.wait(call.now() + _AGAIN_S)
        if call.check() is not None:
            raise TimeoutError("it did not answer in time")
        if not _is_ours(sock):
            raise PermissionError("another user's process answers for it")
        loop.add_reader(sock, call.wake)
        try:
            while call.check() is None:
                try:
                    data, fds, _, _ = socket.recv_fds(sock, _MAX_NBYTES, MAX_POOLS, socket.MSG_CMSG_CLOEXEC)
                    break
                except BlockingIOError:
                    await call.wait(call.deadline)
            else:
                raise TimeoutError("it did not answer in time")
        finally:
            loop.remove_reader(sock)
    try:
        if not data:
            raise ConnectionResetError("it hung up")
        pools = _POOLS.decode(data)
        if not 0 < len(pools) == len(fds):
            raise ValueError(f"{len(fds)} descriptors came for {len(pools)} pools")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Exported(pools, tuple(fds))


def _name(token: bytes) -> str:
    return f"\0fdasync-device-{token.hex()}"


def _is_ours(sock: socket.socket) -> bool:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())
