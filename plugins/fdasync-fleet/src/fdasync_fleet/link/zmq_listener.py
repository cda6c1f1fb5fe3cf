"""Binds a wire's ROUTER, and guards the process against connections that use up its file descriptors.

libzmq aborts the process when it accepts an ipc connection and no descriptor is free (4.3.5: `ipc_listener_t::accept`
takes EMFILE for a defect; the tcp listener only spins). So `ListenerGuard` counts descriptors a few times a second. If
fewer than a reserve are left, it closes all listeners for a moment, and libzmq closes the connections that they
accepted. A peer connects again at once, and its link does not notice. A process that only holds connections has lost
them. If that frees nothing, other code holds the descriptors, and the guard does nothing until there were enough again.
If peers hold them and come back, the guard closes ever more rarely, unless hardly any is left.

One danger stays: a process that makes as many connections as the reserve between two looks, or while the loop stands
still, ends this process. The reserve grows with the limit (`ulimit -n`), up to 1024.

Knows no peers. Owned by `ZmqWire`.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

import zmq

from fdasync.errors import ConfigError
from fdasync_fleet.link.address import FileId, check_free, keep_to_us, remove_file

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_LOOK_S = 0.1
# how long listeners stay closed; libzmq closes them on a thread of its own
_CLOSED_S = 0.3
_MAX_RESERVE = 1024
# least time between two closings; it doubles while closing does not help for long
_REST_S = 1.0
_MAX_REST_S = 60.0


def reserve_of(limit: int) -> int:
    """Number of descriptors that connections from outside may not use."""
    return min(_MAX_RESERVE, limit // 4)


def descriptors() -> tuple[int, int]:
    """Number of descriptors that this process has open, and may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # blocking: procfs, microseconds. Linux 6.2 and later have the number in `st_size`, older ones must list them
    try:
        count = os.lstat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError:
        # listing needs a descriptor itself
        count = limit
    return count, limit


class ListenerGuard:
    """See the module.

    Args:
        on_change: called with an address and a reason when its listener is closed, and with "" when it listens again.
        secure: called with an address before the socket is bound to it: sets the options of that listener.

    Attributes:
        shut: addresses whose listeners are closed now, for lack of descriptors.
        times_shut: how often listeners were closed.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        on_change: Callable[[str, str], None] | None,
        secure: Callable[[str], None],
    ) -> None:
        self.shut: list[str] = []
        self.times_shut = 0
        self._sock = sock
        self._loop = loop
        self._on_change = on_change
        self._secure = secure
        self._open: list[str] = []
        self._files: dict[str, FileId] = {}
        self._again_at = 0.0
        self._rest_s = _REST_S
        self._rested_at = 0.0
        self._helps = True
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, address: str) -> str:
        """Listen at an address; returns the actual one. Raises ConfigError."""
        actual = self._bind(address)
        if self._timer is None:
            # bare timer: a look every so often
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        return actual

    def _bind(self, address: str) -> str:
        try:
            self._secure(address)
            self._sock.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError("address", f"cannot listen at {address!r}: {error.strerror}") from None
        actual = bytes(self._sock.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._open.append(actual)
        if (file := keep_to_us(address)) is not None:
            self._files[actual] = file
        return actual

    def close(self) -> None:
        """Remove the socket files, before another process can take the addresses. The wire closes the socket."""
        if self._timer is not None:
            self._timer.cancel()
        for address, file in self._files.items():
            remove_file(address, file)
        self._files.clear()

    def _look(self) -> None:
        # bare timer: a look every so often
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        now = self._loop.time()
        count, limit = descriptors()
        free, reserve = limit - count, reserve_of(limit)
        if free >= reserve + reserve // 4:
            self._helps = True
        if self._open and self._helps and free < reserve and (now >= self._rested_at or free < reserve // 4):
            self._helps = False
            # after a long calm the pause starts small again
            self._rest_s = min(2 * self._rest_s, _MAX_REST_S) if now < self._rested_at + self._rest_s else _REST_S
            self._rested_at = now + self._rest_s
            self._shut_all(f"{count} of {limit} file descriptors were open")
        elif self.shut and now >= self._again_at:
            self._open_again()

    def _shut_all(self, problem: str) -> None:
        self.times_shut += 1
        self._again_at = self._loop.time() + _CLOSED_S
        self.shut += self._open
        closing, self._open = self._open, []
        for address in closing:
            with contextlib.suppress(zmq.ZMQError):
                self._sock.unbind(address)
            if address in self._files:
                remove_file(address, self._files.pop(address))
            self._tell(address, problem)

    def _open_again(self) -> None:
        shut, self.shut = self.shut, []
        for address in shut:
            try:
                check_free(address)
                self._bind(address)
            except (ConfigError, OSError):
                # another process listens there now, and may end
                self.shut.append(address)
                self._again_at = self._loop.time() + _CLOSED_S
            else:
                self._tell(address, "")

    def _tell(self, address: str, problem: str) -> None:
        if self._on_change is not None:
            self._on_change(address, problem)
