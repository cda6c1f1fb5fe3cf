"""The syscalls of a file store: loops around short reads and writes, whole files, and the reading of an object.

Its functions block, and know no index. They run in the threads of `file/store.py`, and in the command line (through
`file/recovery.py` and `file/admin.py`). Bytes go straight between shared regions and files, without joining copies.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.base import Item, Moves, Outcome
from fdasync.cache.store.file.layout import (
    CLEAN,
    EMPTY_RECORD,
    TEMPORARY_SUFFIX,
    Shape,
    encode_head,
    encode_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fdasync.cache.store.file.layout import Order

_IOV_MAX = os.sysconf("SC_IOV_MAX")

# the codes that say that the disk is full
FULL = (errno.ENOSPC, errno.EDQUOT)


class IoError(msgspec.Struct, frozen=True):
    """A failed syscall; kept instead of the exception, whose traceback would keep a caller's buffers.

    Attributes:
        code: errno; 0: no syscall failed, but the object is damaged.
        words: the same in words.
    """

    code: int
    words: str

    @classmethod
    def of(cls, error: OSError) -> IoError:
        return cls(error.errno or errno.EIO, error.strerror or str(error))

    def outcome(self) -> Outcome:
        """The outcome of an item whose syscall failed so."""
        if not self.code:
            return Outcome("damaged", self.words)
        if self.code in FULL:
            return Outcome("full", self.words)
        return Outcome("failed", self.words, transient=True)


def no_room(folder: Path, wanted_nbytes: int, words: str) -> str:
    """The problem of a put on a full disk: the system's words, the bytes needed and the bytes free."""
    try:
        room = os.statvfs(folder)
        free = f"{room.f_bavail * room.f_frsize} are free"
    except OSError as error:
        free = f"how many are free is not known ({error.strerror})"
    return (
        f"{words}: a new file takes {wanted_nbytes} bytes and {free} in {folder}; make room, or lower segment_nbytes"
        " and max_nbytes"
    )


class ReadSlot(msgspec.Struct, frozen=True):
    """One object to be read from a slot.

    Attributes:
        fd, shape: of the segment.
        slot: its place there.
        item: where its bytes go.
        moves: gives their places, piece by piece, and judges them.
    """

    fd: int
    shape: Shape
    slot: int
    item: Item
    moves: Moves


def read_into(fd: int, offset: int, views: Sequence[memoryview]) -> bool:
    """Fill `views` from `offset` on; False: the file ends before. Raises OSError."""
    return _move(os.preadv, fd, offset, views)


def write_from(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Write all of `views` at `offset`. Raises OSError."""
    if not _move(os.pwritev, fd, offset, views):
        raise OSError(errno.EIO, "a write wrote nothing")


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, offset: int, views: Sequence[memoryview]) -> bool:
    left = [view for view in views if view.nbytes]
    while left:
        some = left[:_IOV_MAX]
        moved = call(fd, some, offset)
        if not moved:
            return False
        if len(some) == len(left) and moved == sum([view.nbytes for view in left]):
            # nearly always
            return True
        offset += moved
        for done, view in enumerate(some):
            if moved < view.nbytes:
                left = [view[moved:], *left[done + 1 :]]
                break
            moved -= view.nbytes
        else:
            left = left[len(some) :]
    return True


def read_slot(slot: ReadSlot, stopped: Callable[[], bool]) -> IoError | None:
    """Fill the views of a slot and check their bytes; None: done.

    The kernel gets no advice: it reads ahead by itself, in large folios, while `POSIX_FADV_WILLNEED` reads into single
    pages, which costs every later copy more than the hint gains.
    """
    if stopped():
        return IoError(errno.ECANCELED, "the caller went away")
    fd, begin = slot.fd, slot.shape.value_at(slot.slot)
    arrival = slot.moves.arrive(slot.item)
    try:
        for offset, views in arrival:
            if not read_into(fd, begin + offset, views):
                return IoError(0, "its segment is shorter than it was")
    except OSError as error:
        return IoError.of(error)
    return IoError(0, arrival.problem) if arrival.problem else None


def clear_record(fd: int, shape: Shape, slot: int) -> None:
    """Make a slot empty. Raises OSError."""
    write_from(fd, shape.record_at(slot), [memoryview(EMPTY_RECORD)])


def clear_slots(slots: Sequence[tuple[int, Shape, int]], *, synced: bool) -> list[IoError | None]:
    """Make slots (fd, shape, slot) empty; with `synced` on the disk too. None for each slot where that succeeded."""
    outcomes: dict[int, IoError] = {}
    for number, slot in enumerate(slots):
        try:
            clear_record(*slot)
        except OSError as error:
            outcomes[number] = IoError.of(error)
    for fd in dict.fromkeys(slot[0] for slot in slots) if synced else ():
        try:
            os.fdatasync(fd)
        except OSError as error:
            outcomes |= {number: IoError.of(error) for number, slot in enumerate(slots) if slot[0] == fd}
    return [outcomes.get(number) for number in range(len(slots))]


# -- whole files --------------------------------------------------------------------------------


def make_segment(folder: Path, shape: Shape, boot: bytes, *, synced: bool) -> int:
    """A new segment file, its space taken from the disk; the fd belongs to the caller.

    It gets its name when its head is written: so a file with a segment's name and no head is damaged, not half made.
    Raises OSError: ENOSPC or EDQUOT where the disk has no room.
    """
    temporary = folder / (shape.name + TEMPORARY_SUFFIX)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.nbytes)
        write_from(fd, 0, [memoryview(encode_head(shape, boot))])
        if synced:
            os.fsync(fd)
        os.rename(temporary, folder / shape.name)
        if synced:
            sync_folder(folder)
    except BaseException:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        raise
    return fd


def mark_segment(fd: int, shape: Shape, boot: bytes) -> None:
    """Say in its head, on the disk, that writes of this boot may be missing there. Raises OSError."""
    write_from(fd, 0, [memoryview(encode_head(shape, boot))])
    os.fdatasync(fd)


def settle_segment(fd: int, shape: Shape) -> None:
    """Bring all writes to the disk, then a head that says so. Raises OSError."""
    os.fdatasync(fd)
    write_from(fd, 0, [memoryview(encode_head(shape, CLEAN))])
    os.fdatasync(fd)


def write_order(path: Path, order: Order) -> None:
    """Replace the order of use, whole or not at all. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_from(fd, 0, [memoryview(encode_order(order))])
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
