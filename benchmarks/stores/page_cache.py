"""Drops files from the page cache, and checks that they are gone; needs no root. Used by the benchmark of stores."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def settle(folder: Path) -> None:
    """Sync all segments of a folder, so that earlier writes do not disturb a measurement."""
    for fd in _segments(folder):
        os.fdatasync(fd)


def drop(folder: Path) -> None:
    """Take all of a folder's segments out of the page cache. Raises SystemExit where that does not work."""
    held = total = 0
    for fd in _segments(folder):
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages, of = _resident(fd)
        held, total = held + pages, total + of
    if held > total // 50:
        raise SystemExit(f"{held} of {total} pages in {folder} stay in memory: no read is cold there (a tmpfs?)")


def _segments(folder: Path) -> Iterator[int]:
    """Each segment, open until the next one is asked for."""
    for path in sorted(folder.glob("*.seg")):
        fd = os.open(path, os.O_RDONLY)
        yield fd
        os.close(fd)


def _resident(fd: int) -> tuple[int, int]:
    """Pages of a file in the page cache, and all of them."""
    nbytes = os.fstat(fd).st_size
    # private, because ctypes takes addresses of writable memory only; nothing is written
    with mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = -(-nbytes // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), found
        )
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(one & 1 for one in found), pages
