"""The syscalls of a file store: loops around short reads and writes, and the order of writes that makes it crash-safe.

Everything here blocks and runs in the threads of `file/store.py`'s pool, or in the command line; nothing here knows an
index. Bytes go straight between shared regions and files, without joining copies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.base import Outcome
from fdasync.cache.store.file.layout import (
    CLEAN,
    EMPTY_RECORD,
    TEMPORARY_SUFFIX,
    Record,
    Shape,
    encode_head,
    encode_order,
    encode_record,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fdasync.cache.store.file.layout import Order

_IOV_MAX = os.sysconf("SC_IOV_MAX")

FULL = (errno.ENOSPC, errno.EDQUOT)


class Trouble(msgspec.Struct, frozen=True):
    """What a syscall said; kept instead of the exception, whose traceback would keep a caller's buffers.

    Attributes:
        code: errno, or 0: the file ended too early.
        words: the same, for people.
    """

    code: int
    words: str

    @classmethod
    def of(cls, error: OSError) -> Trouble:
        return cls(error.errno or errno.EIO, error.strerror or str(error))

    def outcome(self) -> Outcome:
        """Of an item."""
        if not self.code:
            return Outcome("damaged", self.words)
        if self.code in FULL:
            return Outcome("full", self.words)
        return Outcome("failed", self.words, transient=True)


def no_room(folder: Path, wanted_nbytes: int, words: str) -> str:
    """In a thread: the words of a disk that is full, with what is needed and what is there."""
    try:
        room = os.statvfs(folder)
        free = f"{room.f_bavail * room.f_frsize} are free"
    except OSError as error:
        free = f"how many are free is not known ({error.strerror})"
    return (
        f"{words}: a new file takes {wanted_nbytes} bytes and {free} in {folder}; make room, or lower segment_nbytes"
        " and max_nbytes"
    )


class WriteSlot(msgspec.Struct, frozen=True):
    """One object on its way to a slot; `views` are its bytes, one after the other, `before` completes them."""

    fd: int
    shape: Shape
    slot: int
    stale: bool
    record: Record
    views: list[memoryview]
    before: Callable[[], None]


class ReadSlot(msgspec.Struct, frozen=True):
    """One object on its way from a slot; `after` says what is wrong with it, or ""."""

    fd: int
    shape: Shape
    slot: int
    views: list[memoryview]
    after: Callable[[], str]


class Written(msgspec.Struct, frozen=True):
    """How the write of one slot ended.

    Attributes:
        trouble: None: the object is there.
        stale: there may be an object's record in the slot, the old one's or this one's.
        kept: the bytes of the slot are what they were.
        skipped: it was not begun, as its caller went away.
    """

    trouble: Trouble | None = None
    stale: bool = False
    kept: bool = False
    skipped: bool = False


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
        offset += moved
        for done, view in enumerate(some):
            if moved < view.nbytes:
                left = [view[moved:], *left[done + 1 :]]
                break
            moved -= view.nbytes
        else:
            left = left[len(some) :]
    return True


def write_slots(slots: Sequence[WriteSlot], *, synced: bool, stopped: Callable[[], bool]) -> list[Written]:
    """Write objects, each so that it is there whole or not at all wherever this process ends.

    Clear what the slot held, write the bytes, then the record. `synced`: so that this also holds, and lasts, where the
    machine ends: each of the three is on the disk before the next. `stopped` is asked between objects.
    """
    return _write_synced(slots, stopped) if synced else [write_slot(slot, stopped) for slot in slots]


def write_slot(slot: WriteSlot, stopped: Callable[[], bool]) -> Written:
    """One object, without syncs."""
    if stopped():
        return Written(stale=slot.stale, kept=True, skipped=True)
    stale, kept = slot.stale, True
    try:
        if stale:
            clear_record(slot.fd, slot.shape, slot.slot)
        stale, kept = False, False
        _write_value(slot)
        stale = True
        _write_record(slot)
    except OSError as error:
        return Written(Trouble.of(error), stale, kept)
    return Written()


def _write_synced(slots: Sequence[WriteSlot], stopped: Callable[[], bool]) -> list[Written]:
    """The same in three rounds, so that many objects share a sync."""
    if stopped():
        return [Written(stale=slot.stale, kept=True, skipped=True) for slot in slots]
    ended: dict[int, Written] = {}

    def each(numbers: list[int], step: Callable[[WriteSlot], None], *, stale: bool, kept: bool = False) -> None:
        for number in numbers:
            try:
                step(slots[number])
            except OSError as error:
                ended[number] = Written(Trouble.of(error), stale, kept)
        for fd in dict.fromkeys(slots[number].fd for number in numbers):
            try:
                os.fdatasync(fd)
            except OSError as error:
                lost = [number for number in numbers if slots[number].fd == fd]
                ended.update((number, Written(Trouble.of(error), True, kept)) for number in lost)

    stale = [number for number, slot in enumerate(slots) if slot.stale]
    each(stale, lambda slot: clear_record(slot.fd, slot.shape, slot.slot), stale=True, kept=True)
    left = [number for number in range(len(slots)) if number not in ended]
    each(left, _write_value, stale=False)
    each([number for number in left if number not in ended], _write_record, stale=True)
    return [ended.get(number, Written()) for number in range(len(slots))]


def read_slot(slot: ReadSlot, stopped: Callable[[], bool]) -> Trouble | None:
    """Fill its views, and check what is in them; None: done.

    Nothing is told to the kernel before: it reads ahead by itself, in large folios, and what `POSIX_FADV_WILLNEED`
    reads lands in single pages, which costs every later copy more than the hint gains.
    """
    if stopped():
        return Trouble(errno.ECANCELED, "the caller went away")
    try:
        whole = read_into(slot.fd, slot.shape.value_at(slot.slot), slot.views)
    except OSError as error:
        return Trouble.of(error)
    problem = slot.after() if whole else "its segment is shorter than it was"
    return Trouble(0, problem) if problem else None


def clear_record(fd: int, shape: Shape, slot: int) -> None:
    """The slot is empty from now on. Raises OSError."""
    write_from(fd, shape.record_at(slot), [memoryview(EMPTY_RECORD)])


def clear_slots(slots: Sequence[tuple[int, Shape, int]], *, synced: bool) -> list[Trouble | None]:
    """Empty slots (fd, shape, slot): None for each that is, and will be found so."""
    outcomes: dict[int, Trouble] = {}
    for number, slot in enumerate(slots):
        try:
            clear_record(*slot)
        except OSError as error:
            outcomes[number] = Trouble.of(error)
    for fd in dict.fromkeys(slot[0] for slot in slots) if synced else ():
        try:
            os.fdatasync(fd)
        except OSError as error:
            outcomes |= {number: Trouble.of(error) for number, slot in enumerate(slots) if slot[0] == fd}
    return [outcomes.get(number) for number in range(len(slots))]


def _write_value(slot: WriteSlot) -> None:
    slot.before()
    write_from(slot.fd, slot.shape.value_at(slot.slot), slot.views)


def _write_record(slot: WriteSlot) -> None:
    record = encode_record(slot.record, slot.shape, slot.slot)
    write_from(slot.fd, slot.shape.record_at(slot.slot), [memoryview(record)])


# -- whole files --------------------------------------------------------------------------------


def make_segment(folder: Path, shape: Shape, boot: bytes, *, synced: bool) -> int:
    """A new segment file, its space taken from the disk; the fd belongs to the caller.

    It gets its name when its head is written: a file with a segment's name and no head is damage, never half a start.
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


def settle_segment(fd: int, shape: Shape, *, synced: bool) -> None:
    """Bring all that was written to the disk, and say so in its head. Raises OSError."""
    os.fdatasync(fd)
    write_from(fd, 0, [memoryview(encode_head(shape, CLEAN))])
    if synced:
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
