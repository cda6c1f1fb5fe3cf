"""Content of device memory that is kept on the host while the device's memory is given away.

The host's pages are registered with the driver, so copies go at the full speed of the bus both ways. Registering takes
far longer than a copy; it happens at the first `save`, piece by piece beside the copies, and the pages stay for the
next one. Huge pages are asked for: there are fewer to register. Knows addresses, and not what they mean. Called by
runners.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING

from fdasync.errors import RunnerError
from fdasync.gpu.cudart import PIECE_NBYTES

if TYPE_CHECKING:
    from fdasync.gpu.cudart import Driver


class HostCopy:
    """See the module.

    Args:
        driver: its calls work in the context that torch made current.
        nbytes: of the content.
        piece_nbytes: of each registration, a multiple of the page size.

    Attributes:
        nbytes: as given.
    """

    def __init__(self, driver: Driver, nbytes: int, piece_nbytes: int = PIECE_NBYTES) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self._piece_nbytes = piece_nbytes
        self._pages: mmap.mmap | None = None
        self._address = 0
        self._registered: list[int] = []

    def save(self, source: int, stream: int) -> None:
        """Queue copies of the device's bytes at `source` to the host; blocks while pages are registered. The caller
        waits for the stream, also where this raises.

        Raises RunnerError where the host has no such memory, or it cannot be registered.
        """
        if self._pages is None:
            self._open()
        for number, (offset, count) in enumerate(self._pieces()):
            if number == len(self._registered):
                self._driver.register(self._address + offset, count)
                self._registered.append(self._address + offset)
            self._driver.copy(self._address + offset, source + offset, count, stream)

    def restore(self, target: int, stream: int) -> None:
        """Queue copies of the host's bytes, which a `save` left, to the device. Raises DeviceFailed."""
        for offset, count in self._pieces():
            self._driver.copy(target + offset, self._address + offset, count, stream)

    def _open(self) -> None:
        try:
            pages = mmap.mmap(-1, max(self.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise RunnerError(f"{self.nbytes} bytes of host memory cannot be had: {error}") from error
        # a kernel may have none
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages = pages
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    def _pieces(self) -> list[tuple[int, int]]:
        return [
            (offset, min(self._piece_nbytes, self.nbytes - offset))
            for offset in range(0, self.nbytes, self._piece_nbytes)
        ]

    def close(self) -> None:
        """Free the pages; idempotent. No copy may be in flight. Raises RunnerError after trying every piece."""
        problems = []
        for start in self._registered:
            try:
                self._driver.unregister(start)
            except RunnerError as error:
                problems.append(error)
        self._registered = []
        pages, self._pages = self._pages, None
        if problems:
            # pages that are registered still must not be unmapped
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))
            raise problems[0]
        if pages is not None:
            pages.close()
