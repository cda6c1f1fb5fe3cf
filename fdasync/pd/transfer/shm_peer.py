"""Memory of another process: found by process id and fd, believed only when it is what was meant, mapped read-only.

Nothing that a source says is trusted. A path is opened without effects first (O_PATH) and looked at; only memfds that
are sealed against shrinking are mapped (a mapping of anything else could be cut off: SIGBUS). The identity page, a
memfd that nobody can change any more, holds the token and the inode of each region. Blocks for microseconds: procfs
and memfds wait for nothing. Used by `shm.py`.
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

from fdasync.pd.transfer.validation import MAX_REGIONS, TOKEN_NBYTES, broken, refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.pd.messages import Source

IDENTITY_NBYTES = 4096
_MAGIC = b"fdasync-blocks-1"
_REGION = struct.Struct("<QQ")  # device and inode
_MAX_PID = (1 << 31) - 1
# of a memfd, for its fd is what makes it one
_FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_identity(token: bytes, fds: Sequence[int]) -> int:
    """A memfd with the page that says which regions these are; the fd is the caller's. Raises OSError."""
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
    """It is not what was meant."""


class Peer:
    """The regions of one source.

    Attributes:
        num_regions: of blocks: all but the identity page.
        maps: of these, read-only; none once closed.
    """

    def __init__(self, num_regions: int) -> None:
        self.num_regions = num_regions
        self.maps: list[mmap.mmap] = []

    @classmethod
    def map(cls, source: Source) -> Peer | Outcome:
        """Its mappings; or why there are none. The source is well-formed and of this machine."""
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
        told = page[len(_MAGIC) : len(_MAGIC) + TOKEN_NBYTES]
        if not page.startswith(_MAGIC) or not hmac.compare_digest(told, source.token):
            raise _Refused("another process has the sender's process id, or the source is wrong")
        at = len(_MAGIC) + TOKEN_NBYTES
        assert at + MAX_REGIONS * _REGION.size <= IDENTITY_NBYTES
        for number, nbytes in regions:
            with _opened(source.pid, number, nbytes, fcntl.F_SEAL_SHRINK) as fd:
                found = os.fstat(fd)
                if _REGION.pack(found.st_dev, found.st_ino) != page[at : at + _REGION.size]:
                    raise _Refused("another file has a file descriptor of the source's")
                # what is mapped is the sender's whole region and no more: its size was looked at
                self.maps.append(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
            at += _REGION.size

    def view(self, region: int, offset: int, nbytes: int) -> memoryview:
        """Some bytes, read-only; release it before others run: `close` cannot drop what somebody looks at."""
        with memoryview(self.maps[region]) as whole:
            return whole[offset : offset + nbytes]

    def close(self) -> None:
        """Drop the mappings; idempotent."""
        while self.maps:
            self.maps.pop().close()


@contextlib.contextmanager
def _opened(pid: int, number: int, nbytes: int, seals: int) -> Iterator[int]:
    """A memfd of that process, of that size and with these seals, open for reading. Raises _Refused, OSError."""
    # blocking: procfs, microseconds. O_PATH opens nothing: a pipe, a device or a far file is looked at only
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
            raise _Refused("memory of the source's is not sealed")
        if not 1 <= nbytes <= os.fstat(fd).st_size:
            raise _Refused("memory of the source's has another size")
        yield fd
    finally:
        os.close(fd)
