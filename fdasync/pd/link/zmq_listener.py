"""Where a wire's ROUTER listens, and that its callers do not use up the process's file descriptors.

libzmq aborts the process when it accepts an ipc connection and no descriptor is free (4.3.5: `ipc_listener_t::accept`
takes EMFILE for a defect; the tcp one only spins). So descriptors are counted a few times a second; when fewer than a
reserve are left, listeners are closed for a moment. libzmq closes what they accepted with them: who is a peer calls
again at once, and its link does not notice; who only holds connections has lost them. Where that frees nothing, the
descriptors are somebody else's, and it is not done again until there were enough; where peers use them and come back,
it is done ever more rarely, unless hardly any is left.

What is left of the danger: who makes as many connections as the reserve between two looks, or while the loop stands
still, still ends the process. The reserve grows with the limit (`ulimit -n`), up to 1024.

Owned by `ZmqWire`; decides nothing about peers.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

import zmq

from fdasync.errors import ConfigError
from fdasync.pd.link.address import FileId, check_free, keep_to_us, remove_file

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_LOOK_S = 0.1
# a listener of libzmq's closes on its own thread
_CLOSED_S = 0.3
_MAX_RESERVE = 1024
# between two times, at first; it doubles while it does not help for long
_REST_S = 1.0
_MAX_REST_S = 60.0


def reserve_of(limit: int) -> int:
    """Descriptors that are not for those who call us."""
    return min(_MAX_RESERVE, limit // 4)


def descriptors() -> tuple[int, int]:
    """How many this process has open, and may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # blocking: procfs, microseconds. Linux 6.2 and later count them here, older ones have to list them
    try:
        count = os.lstat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError:
        # to list them takes one
        count = limit
    return count, limit


class Doors:
    """See the module.

    Args:
        told: called with an address and a reason when it is closed, and with "" when it is listened at again.

    Attributes:
        shut: addresses that are not listened at just now, for lack of descriptors.
        times_shut: how often that came about.
    """

    def __init__(
        self, sock: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, told: Callable[[str, str], None] | None
    ) -> None:
        self.shut: list[str] = []
        self.times_shut = 0
        self._sock = sock
        self._loop = loop
        self._told = told
        self._open: list[str] = []
        self._files: dict[str, FileId] = {}
        self._again_at = 0.0
        self._rest_s = _REST_S
        self._rested_at = 0.0
        self._helps = True
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, address: str) -> str:
        """Returns the actual address. Raises ConfigError."""
        actual = self._bind(address)
        if self._timer is None:
            # bare timer: a look every so often
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        return actual

    def _bind(self, address: str) -> str:
        try:
            self._sock.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError("address", f"cannot listen at {address!r}: {error.strerror}") from None
        actual = bytes(self._sock.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._open.append(actual)
        if (file := keep_to_us(address)) is not None:
            self._files[actual] = file
        return actual

    def close(self) -> None:
        """Remove the files, while nobody else can take the addresses; the socket is the wire's."""
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
            # a long calm is forgotten with what was before it
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
                # somebody else listens there now; it may go
                self.shut.append(address)
                self._again_at = self._loop.time() + _CLOSED_S
            else:
                self._tell(address, "")

    def _tell(self, address: str, problem: str) -> None:
        if self._told is not None:
            self._told(address, problem)
