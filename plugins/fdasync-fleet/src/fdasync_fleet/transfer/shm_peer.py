"""Maps memory of another process read-only, found by process id and fd, after checking that it is the source's.

No value of a source is trusted. A path is first opened without effects (O_PATH) and examined. Only memfds whose memfd
seals forbid shrinking are mapped, since another file could be cut off under the mapping (SIGBUS). The identity page, a
memfd that no process can change, holds the token and the inode of each region. Blocks for microseconds: procfs and
memfds wait for nothing. Knows no copies. Called by `shm.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import stat
import struct
from typing import TYPE_CHECKING

from fdasync_fleet.transfer.validation import MAX_REGIONS, TOKEN_NBYTES, broken, refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync_fleet.messages import Source

IDENTITY_NBYTES = 4096
_MAGIC = b"fdasync-blocks-1"
_REGION = struct.Struct("<QQ")  # device and inode
_MAX_PID = (1 << 31) - 1
# memfd seals of a page that can never change
_FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_identity(token: bytes, fds: Sequence[int]) -> int:
    """A memfd with the identity page of these regions; the caller closes the fd. Raises OSError."""
    page = _MAGIC + token
    for fd in fds:
        found = os.fstat(fd)
        page += _REGION.pack(found.st_dev, found.st_ino)
    fd = os.memfd_create("fdasync-identity", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, page.ljust(IDENTITY_NBYTES, b"\0"), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FROZEN | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Refused(Exception):
    """The memory is not the source's."""


class Peer:
    """The mapped regions of one source.

    Attributes:
        num_regions: number of regions without the identity page.
        maps: their read-only mappings; empty once closed.
    """

    def __init__(self, num_regions: int) -> None:
        self.num_regions = num_regions
        self.maps: list[mmap.mmap] = []

    @classmethod
    def map(cls, source: Source) -> Peer | Outcome:
        """Map a source's regions; or why that fails. The source is well-formed and of this machine."""
        if not 1 <= source.pid <= _MAX_PID or not source.regions:
            return refused("the source names no process or no regions of it")
        peer = cls(len(source.regions) - 1)
        try:
            peer._map(source)
        except _Refused as error:
            peer.close()
            return refused(str(error))
        except (FileNotFoundError, ProcessLookupError):
            peer.close()
            return refused("the sender's process or its memory is gone")
        except (OSError, ValueError, OverflowError) as error:
            peer.close()
            return broken(f"the sender's memory cannot be mapped: {error}")
        except BaseException:
            peer.close()
            raise
        return peer

    def _map(self, source: Source) -> None:
        *regions, (identity_fd, identity_nbytes) = source.regions
        with _opened(source.pid, identity_fd, identity_nbytes, _FROZEN) as fd:
            page = os.pread(fd, IDENTITY_NBYTES, 0)
        token = page[len(_MAGIC) : len(_MAGIC) + TOKEN_NBYTES]
        if not page.startswith(_MAGIC) or not hmac.compare_digest(token, source.token):
            raise _Refused("another process has the sender's process id, or the source is wrong")
        at = len(_MAGIC) + TOKEN_NBYTES
        assert at + MAX_REGIONS * _REGION.size <= IDENTITY_NBYTES
        for number, nbytes in regions:
            with _opened(source.pid, number, nbytes, fcntl.F_SEAL_SHRINK) as fd:
                found = os.fstat(fd)
                if _REGION.pack(found.st_dev, found.st_ino) != page[at : at + _REGION.size]:
                    raise _Refused("another file has a file descriptor of the source's")
                # `_opened` has checked the size: the mapping ends inside the file
                self.maps.append(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
            at += _REGION.size

    def view(self, region: int, offset: int, nbytes: int) -> memoryview:
        """A read-only view. Release it before other tasks run: `close` fails while a view exists."""
        with memoryview(self.maps[region]) as whole:
            return whole[offset : offset + nbytes]

    def close(self) -> None:
        """Drop the mappings; idempotent."""
        while self.maps:
            self.maps.pop().close()


@contextlib.contextmanager
def _opened(pid: int, number: int, nbytes: int, seals: int) -> Iterator[int]:
    """A memfd of a process, of at least this size, with these memfd seals, for reading. Raises _Refused, OSError."""
    # blocking: procfs, microseconds. O_PATH has no effect on a pipe, a device or a remote file
    path = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(path).st_mode) or os.fstat(path).st_nlink:
            raise _Refused("a file descriptor of the source's is not shared memory")
        fd = os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(path)
    try:
        try:
            found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise _Refused("a file descriptor of the source's is not shared memory") from None
        if found & seals != seals:
            raise _Refused("memory of the source's lacks its memfd seals")
        if not 1 <= nbytes <= os.fstat(fd).st_size:
            raise _Refused("memory of the source's has another size")
        yield fd
    finally:
        os.close(fd)
