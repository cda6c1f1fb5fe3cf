"""Memory that processes share by file descriptor: a memfd and one mapping of it.

The memory vanishes with its last descriptor and mapping, so there is nothing to unlink. The memfd cannot shrink, so
that no process can make another die of SIGBUS. This module does not know what the bytes mean. The engine creates
regions (`cache/aux_arena.py`, `cache/host_arena.py`); the worker and the store's process attach to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PAGE_NBYTES = 4096
#: regions of an engine: KV of host blocks, rows
HOST_REGION = 0
AUX_REGION = 1
#: stands for the blocks of an engine's devices, one after the other; no region of shared memory
DEVICE_REGION = 15


def state_region(*, with_rows: bool) -> int:
    """The region of an engine's recurrent states: behind that of rows, if it has one."""
    return AUX_REGION + with_rows


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of bytes of a region.

    Attributes:
        region: number of the region, its place in the sequence that `Store.open` gets.
        offset: of the first byte.
        nbytes: how many bytes; may be 0.
    """

    region: int
    offset: int
    nbytes: int


def page_aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return (nbytes + PAGE_NBYTES - 1) // PAGE_NBYTES * PAGE_NBYTES


class SharedRegion:
    """One mapping, readable and writable.

    Attributes:
        fd: the memfd, owned by this object, to be passed to another process; -1 once closed.
        nbytes: of the mapping.
        map: the mapping itself, for numpy and torch to build views on.
    """

    # how it crosses to another process (`ipc/remote.py`): by its size, and its descriptor
    plan_type = int

    def __init__(self, fd: int, nbytes: int, *, keeps_fd: bool = True) -> None:
        """Attach to `fd`, which this object owns from now on, and closes where it raises.

        `keeps_fd`: the mapping has a descriptor of its own, as Python's mappings have. False: no descriptor is open
        once this object is closed; for kinds of regions that are many.

        Raises InvariantBroken if it is too small, OSError.
        """
        self.fd = fd
        self.nbytes = nbytes
        self.map: Any
        try:
            if os.fstat(fd).st_size < nbytes:
                raise InvariantBroken(f"the shared region has {os.fstat(fd).st_size} bytes, {nbytes} are needed")
            if keeps_fd:
                self.map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                self.map = _mapped(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(cls, name: str, nbytes: int, *, keeps_fd: bool = True) -> SharedRegion:
        """A new region of zeros; its pages are touched by the process that writes them first. Raises OSError."""
        fd = os.memfd_create(f"fdasync-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes, keeps_fd=keeps_fd)

    @property
    def plan(self) -> int:
        return self.nbytes

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,)

    @classmethod
    def attach(cls, plan: int, fds: Iterator[int]) -> SharedRegion:
        """The memory of another process. Raises as the constructor."""
        return cls(next(fds), plan)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A writable view of some of its bytes; the mapping lives while views do."""
        stop = self.nbytes if nbytes is None else offset + nbytes
        if not 0 <= offset <= stop <= self.nbytes:
            raise InvariantBroken(f"bytes {offset} to {stop} are outside a shared region of {self.nbytes}")
        return memoryview(self.map)[offset:stop]

    def close(self) -> None:
        """Drop the mapping and the fd; idempotent. The bytes live on while views of them do."""
        if self.fd < 0:
            return
        if isinstance(self.map, mmap.mmap):
            with contextlib.suppress(BufferError):
                self.map.close()
        os.close(self.fd)
        self.fd = -1


def _mapped(fd: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes behind a descriptor, without a copy of the descriptor; unmapped with the last view. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(pages, libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(pages), np.uint8)
