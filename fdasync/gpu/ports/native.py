"""What needs ctypes: a timer as an fd, and a libc function that the CUDA driver can call to wake a loop.

Knows nothing of ports. No Python runs on the driver's threads: a host function that needed the GIL could deadlock
with a caller that holds it inside the driver. Called by `adaptive.py` and `other.py`.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_IOFBF = 0
_ONE = (1).to_bytes(8, "little")


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
        """Call `on_time` once after this many seconds, instead of what was set before. Not after `close`."""
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


class Notifier:
    """Native calls that wake a loop: `function(file)`, with `function` an address in libc, may run on any thread.

    The function is `fflush`, each file a FILE* over an eventfd with eight bytes in its buffer, so a call adds one to
    the eventfd and runs no Python. Calls must come in the order the files were loaded (one stream), so the count
    says whose turn has come and which files may be loaded again.

    Args:
        on_news: called on the loop with the number of calls that have come since.
        limit: most files at a time.

    Attributes:
        function: address of a C function of one pointer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_news: Callable[[int], None], limit: int = 32) -> None:
        self._loop = loop
        self._on_news = on_news
        self._limit = limit
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
        libc.fdopen.restype = ctypes.c_void_p
        libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
        libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        libc.fwrite.restype = ctypes.c_size_t
        libc.fflush.argtypes = [ctypes.c_void_p]
        libc.fclose.argtypes = [ctypes.c_void_p]
        self._libc = libc
        function = ctypes.cast(libc.fflush, ctypes.c_void_p).value
        assert function is not None
        self.function = function
        self._fds: dict[int, int] = {}
        self._free: list[int] = []
        self._out: deque[int] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._fd, self._ready)

    @property
    def out(self) -> int:
        """Files that are loaded and whose call has not come."""
        return len(self._out)

    def load(self) -> int | None:
        """Address of a file to call `function` with, exactly once; None while all of them are out.

        Raises OSError if there is no fd for another.
        """
        if self._free:
            file = self._free.pop()
        elif len(self._fds) < self._limit:
            file = self._open()
        else:
            return None
        # a call that has just come may still hold the file's lock, for less than a microsecond
        if self._libc.fwrite(_ONE, 1, 8, file) != 8:
            raise OSError(ctypes.get_errno(), "fwrite")
        self._out.append(file)
        return file

    def close(self) -> None:
        """`on_news` is not called any more, and calls that come later do nothing. May be called twice."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        for file in self._free:
            self._libc.fclose(file)
        for file in self._out:
            # The driver may still call this one, whenever: its memory stays for good (a few KiB), but its buffer is
            # emptied here, so that such a call finds nothing to write and does not touch an fd that is someone else's.
            self._libc.fflush(file)
            os.close(self._fds[file])
        self._free.clear()
        self._out.clear()
        self._fds.clear()
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        # each has an fd of its own, as closing a file closes that
        fd = os.dup(self._fd)
        file: int | None = self._libc.fdopen(fd, b"w")
        if not file:
            os.close(fd)
            raise OSError(ctypes.get_errno(), "fdopen")
        self._libc.setvbuf(file, None, _IOFBF, 4096)
        self._fds[file] = fd
        return file

    def _ready(self) -> None:
        try:
            count = os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        for _ in range(count):
            self._free.append(self._out.popleft())
        self._on_news(count)


def cuda_launcher() -> Callable[[int, int, int], None]:
    """`launch(stream, function, argument)`: `cuLaunchHostFunc`, with all three as addresses.

    The function is called on a thread of the driver once everything before it on the stream is done; after an error
    of the device perhaps never. `launch` raises OSError with the driver's name of the error.

    Raises OSError where there is no CUDA driver.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    call = cuda.cuLaunchHostFunc
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_int
    cuda.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def launch(stream: int, function: int, argument: int) -> None:
        status = call(stream, function, argument)
        if status:
            name = ctypes.c_char_p()
            cuda.cuGetErrorName(status, ctypes.byref(name))
            raise OSError(status, f"cuLaunchHostFunc: {(name.value or b'unknown error').decode()}")

    return launch
