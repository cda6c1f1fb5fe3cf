"""A timer of the kernel as an fd, by ctypes. Knows nothing of ports. Called by `adaptive.py`."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("it_interval", _TimeSpec), ("it_value", _TimeSpec))


class TimerFd:
    """One timer of the kernel's resolution on a loop; the loops' own timers are in whole milliseconds.

    Raises OSError if the kernel gives none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_time: Callable[[], None]) -> None:
        self._loop = loop
        self._on_time = on_time
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p]
        self._spec = _TimerSpec()
        self._spec_pointer = ctypes.pointer(self._spec)
        self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._ready)

    def arm(self, delay_s: float) -> None:
        """Call `on_time` once after this many seconds, and not at the time set before. May not follow `close`."""
        # zero would disarm it
        delay_ns = max(int(delay_s * 1e9), 1)
        self._spec.it_value.tv_sec, self._spec.it_value.tv_nsec = divmod(delay_ns, 1_000_000_000)
        if self._settime(self._fd, 0, self._spec_pointer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """`on_time` is not called any more. May be called twice."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            # set anew since the loop saw it ready
            return
        self._on_time()
