"""Framed messages over a Unix socket pair, without threads and without streams.

A frame is a little-endian uint32 length, a byte that says how many file descriptors ride on it, and the
payload. The fds go with the frame's first byte (SCM_RIGHTS), but one read may bring them together with the
frames before it: hence the count. Writes never wait: bytes that the kernel does not take at once are kept, in
order, and sent when the socket is writable. The end of the stream is the peer's death. The module knows no message
types. Both sides of a child process use it (`ipc/child.py`, `ipc/service.py`).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

MAX_FRAME_NBYTES = 256 << 20
_RECV_NBYTES = 1 << 18
_MAX_FDS = 16
_HEADER = struct.Struct("<IB")


class Channel:
    """One end of the socket pair. It owns `sock` and closes it.

    Args:
        on_frame: called in the loop with payload and fds, which belong to the callee; an error that it raises ends the
            channel.
        on_end: called in the loop, once, with the error that ended the channel, or None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[bytes, list[int]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._unread = bytearray()
        # made once: an allocation of this size for each read may cost more than the read
        self._received = memoryview(bytearray(_RECV_NBYTES))
        self._fds: list[int] = []
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._closed = False
        loop.add_reader(sock.fileno(), self._read)

    @property
    def unsent_nbytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(len(part) for part, _ in self._unsent)

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame. The fds stay the caller's, who may close them at once: copies wait for the kernel.

        After `close`, or when the peer is gone, frames are dropped. Raises ProtocolError for a frame above the limits,
        OSError where there is no descriptor left for a copy.
        """
        if self._closed:
            return
        if len(payload) > MAX_FRAME_NBYTES or len(fds) > _MAX_FDS:
            limit = f"{MAX_FRAME_NBYTES} bytes or {_MAX_FDS} fds"
            raise ProtocolError(f"a frame of {len(payload)} bytes with {len(fds)} fds is above the limit of {limit}")
        frame = _HEADER.pack(len(payload), len(fds)) + payload
        self._unsent.append((memoryview(frame), _copies(fds)))
        if len(self._unsent) == 1 and not self._write_some():
            self._loop.add_writer(self._sock.fileno(), self._write)

    def close(self) -> None:
        """Stop reading and writing; idempotent. `on_end` is not called any more."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._drop_unsent()
        _close(self._fds)

    def _write(self) -> None:
        if self._write_some():
            self._loop.remove_writer(self._sock.fileno())

    def _write_some(self) -> bool:
        """Send until the socket is full; True when nothing is left."""
        while self._unsent:
            part, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [part], fds) if fds else self._sock.send(part)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # the reader sees the end of the stream and reports it
                self._drop_unsent()
                return True
            _close(fds)
            if sent < len(part):
                self._unsent[0] = (part[sent:], [])
            else:
                self._unsent.popleft()
        return True

    def _drop_unsent(self) -> None:
        for _, fds in self._unsent:
            _close(fds)
        self._unsent.clear()

    def drain(self) -> None:
        """Deliver all frames that the peer wrote before it ended."""
        while not self._closed and self._read():
            pass

    def _read(self) -> bool:
        """Read once and deliver; True if there may be more."""
        try:
            nbytes, ancillary, _flags, _address = self._sock.recvmsg_into(
                [self._received], socket.CMSG_LEN(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(error)
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array.array("i", payload[: len(payload) // 4 * 4])
        if not nbytes:
            self._end(None)
            return False
        if not self._unread and not self._fds and nbytes >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._received)
            if not count and size == nbytes - _HEADER.size:
                # one frame and all of it: nearly every read
                self._hand_over(bytes(self._received[_HEADER.size : nbytes]), [])
                return True
        self._unread += self._received[:nbytes]
        self._deliver()
        return True

    def _deliver(self) -> None:
        at = 0
        frames: list[tuple[bytes, list[int]]] = []
        broken: ProtocolError | None = None
        while not self._closed and len(self._unread) - at >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._unread, at)
            if size > MAX_FRAME_NBYTES or count > len(self._fds):
                broken = ProtocolError(f"a frame of {size} bytes is above {MAX_FRAME_NBYTES}, or lacks its {count} fds")
                break
            start = at + _HEADER.size
            if len(self._unread) - start < size:
                break
            payload = bytes(memoryview(self._unread)[start : start + size])
            at = start + size
            fds, self._fds = self._fds[:count], self._fds[count:]
            frames.append((payload, fds))
        # removed before they are delivered: whatever a callee raises, no frame is delivered twice
        if not self._closed:
            del self._unread[:at]
        for number, (payload, fds) in enumerate(frames):
            if self._closed:
                for _, left in frames[number:]:
                    for fd in left:
                        os.close(fd)
                return
            self._hand_over(payload, fds)
        if broken is not None:
            self._end(broken)

    def _hand_over(self, payload: bytes, fds: list[int]) -> None:
        try:
            self._on_frame(payload, fds)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._on_end(error)


def _copies(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        _close(copies)
        raise
    return copies


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
