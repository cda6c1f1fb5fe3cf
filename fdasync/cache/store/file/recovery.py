"""Read a file store's folder: its lock, its segments, the record of each slot, and an index made of these.

Reading changes nothing and may be done while an engine uses the folder: files that vanish meanwhile are left out.
`load` starts a store; it needs the lock, and removes only files that a store left half made. The module does not know
what objects mean. `file/store.py` and `file/admin.py` call it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from pathlib import Path

import msgspec

from fdasync.cache.store.file.index import Entry, FileIndex, Segment
from fdasync.cache.store.file.io import clear_record
from fdasync.cache.store.file.layout import (
    CLEAN,
    LOCK_NAME,
    ORDER_NAME,
    RECORD_NBYTES,
    TEMPORARY_SUFFIX,
    LayoutError,
    Order,
    Record,
    Shape,
    decode_head,
    decode_order,
    decode_record,
    parse_name,
)
from fdasync.errors import StoreRejected, StoreUnavailable

# codes that say that the folder can never be used
_WRONG_PLACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP,
    errno.ENAMETOOLONG, errno.EINVAL,
)  # fmt: skip
_UNKNOWN_BOOT = b"\1" * 16


class Listing(msgspec.Struct, frozen=True):
    """The files of a folder.

    Attributes:
        segments: their shapes.
        temporaries: files that a start removes.
        unknown: files that are not the store's.
    """

    segments: list[Shape]
    temporaries: list[str]
    unknown: list[str]


class SegmentScan(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a segment.

    Attributes:
        shape: its layout.
        boot: the boot in its head; `CLEAN` if the head is damaged.
        problem: why the segment is not believed; "": it is.
        records: objects by slot; of a segment that is not believed too, if they can be read.
        damaged: the problem of each slot whose record is damaged; the slot counts as empty.
    """

    shape: Shape
    boot: bytes
    problem: str
    records: dict[int, Record]
    damaged: dict[int, str]


class Loaded(msgspec.Struct, frozen=True):
    """A folder, as it was at the start.

    Attributes:
        index: its objects and segments.
        next_sequence: the first sequence number that no object has.
        next_number: the first number that no segment has.
        damaged: how many slots and segments are damaged.
    """

    index: FileIndex
    next_sequence: int
    next_number: int
    damaged: int


def boot_id() -> bytes:
    """16 bytes that name this boot of the machine; never `CLEAN`."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return _UNKNOWN_BOOT  # then loss of power goes unnoticed here, and damage is found when an object is read


# -- the lock -----------------------------------------------------------------------------------


def take_lock(folder: Path, name: str, cap_nbytes: int | None) -> int:
    """The folder's lock, as an fd that keeps it until it is closed; the lock file gets this process id and the cap.

    Raises StoreRejected if another process has it, OSError.
    """
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").partition("\n")[0]
            raise StoreRejected(
                name,
                f"{folder} is in use by process {holder or 'unknown'}, the store's process of another engine",
                "close that engine, or give this one a folder of its own; many engines share through Mooncake",
            ) from None
        # the lock is taken on a full disk too
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{cap_nbytes or ''}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_holder(folder: Path) -> str:
    """The process that has the folder's lock, "" if none has; found without taking it. Raises OSError."""
    try:
        inode = (folder / LOCK_NAME).stat().st_ino
        pid = (folder / LOCK_NAME).read_text().partition("\n")[0]
    except FileNotFoundError:
        return ""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()  # "1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF"
        if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            return pid or words[4]
    return ""


def read_cap(folder: Path) -> int | None:
    """The cap of the engine that opened the folder last; 0: not known; None: no engine ever opened it."""
    try:
        lines = (folder / LOCK_NAME).read_text("ascii", "replace").splitlines()
    except FileNotFoundError:
        return None
    return int(lines[1]) if len(lines) > 1 and lines[1].isdecimal() else 0


# -- looking ------------------------------------------------------------------------------------


def list_folder(folder: Path) -> Listing:
    """The files of a folder, in order of names. Raises OSError."""
    segments, temporaries, unknown = [], [], []
    for name in sorted(os.listdir(folder)):
        shape = parse_name(name)
        base = name.removesuffix(TEMPORARY_SUFFIX)
        if shape is not None and stat.S_ISREG(os.lstat(folder / name).st_mode):
            segments.append(shape)
        elif base != name and (base == ORDER_NAME or parse_name(base) is not None):
            temporaries.append(name)
        elif name not in (LOCK_NAME, ORDER_NAME):
            unknown.append(name)
    return Listing(segments, temporaries, unknown)


def scan_segment(fd: int, shape: Shape, boot: bytes) -> SegmentScan:
    """Read head and table of a segment; `boot` is the machine's now. Raises OSError."""
    found_boot, problem, table, nbytes = CLEAN, "", b"", os.fstat(fd).st_size
    try:
        # no more than the file has: a name may promise more than fits into memory
        table = os.pread(fd, min(shape.table_nbytes, nbytes), 0)
        found_boot = decode_head(table, shape)
    except LayoutError as error:
        problem = error.problem
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    else:
        if nbytes < shape.nbytes:
            problem = f"it has {nbytes} bytes of {shape.nbytes}"
        elif found_boot not in (CLEAN, boot):
            problem = "the machine stopped before all writes to it were on the disk"
    records: dict[int, Record] = {}
    damaged: dict[int, str] = {}
    for slot in range(min(shape.slots, len(table) // RECORD_NBYTES)):
        at = shape.record_at(slot)
        if at + RECORD_NBYTES > len(table):
            break
        try:
            try:
                record = decode_record(table[at : at + RECORD_NBYTES], shape, slot)
            except LayoutError:
                # a live engine may just have been writing it
                record = decode_record(os.pread(fd, RECORD_NBYTES, at), shape, slot)
        except LayoutError as error:
            damaged[slot] = error.problem
        else:
            if record is not None:
                records[slot] = record
    return SegmentScan(shape=shape, boot=found_boot, problem=problem, records=records, damaged=damaged)


def scan_folder(folder: Path) -> tuple[Listing, list[SegmentScan]]:
    """The files of a folder and the content of its segments. Raises OSError if the folder cannot be read."""
    listing = list_folder(folder)
    boot = boot_id()
    scans = []
    for shape in listing.segments:
        try:
            fd = os.open(folder / shape.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            scans.append(scan_segment(fd, shape, boot))
        finally:
            os.close(fd)
    return listing, scans


def read_order(folder: Path) -> Order:
    """The order of use; an empty one if none can be read."""
    try:
        return decode_order((folder / ORDER_NAME).read_bytes())
    except (OSError, LayoutError):
        return Order(0, [])


# -- starting -----------------------------------------------------------------------------------


def load(folder: Path, max_nbytes: int, segment_nbytes: int, boot: bytes) -> Loaded:
    """Index a folder and open its segments. Needs the lock. Raises OSError, with nothing left open."""
    listing = list_folder(folder)
    for name in listing.temporaries:
        (folder / name).unlink(missing_ok=True)
    index = FileIndex(max_nbytes, segment_nbytes)
    opened: list[int] = []
    damaged = 0
    best: dict[str, Entry] = {}
    older: list[Entry] = []
    try:
        for shape in listing.segments:
            fd = os.open(folder / shape.name, os.O_RDWR | os.O_CLOEXEC)
            opened.append(fd)
            scan = scan_segment(fd, shape, boot)
            damaged += len(scan.damaged) + bool(scan.problem)
            segment = Segment(shape, fd, scan.boot, believed=not scan.problem)
            if segment.believed:
                # slots are taken from the end
                segment.free = [slot for slot in reversed(range(shape.slots)) if slot not in scan.records]
                segment.stale = set(scan.damaged)
                for slot, record in scan.records.items():
                    entry = Entry(record.key, segment, slot, record.nbytes, record.sequence, record.written_ns)
                    other = best.get(record.key)
                    if other is None or other.sequence < entry.sequence:
                        best[record.key] = entry
                        older += [other] if other is not None else []
                    else:
                        older.append(entry)
            index.add_segment(segment)
        for entry in older:
            # an older object of a key must not come back when the newer one is deleted
            with contextlib.suppress(OSError):
                clear_record(entry.segment.fd, entry.segment.shape, entry.slot)
            index.release(entry.segment, entry.slot, stale=True)
        next_sequence = _in_order(index, list(best.values()), read_order(folder))
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    next_number = max((shape.number for shape in listing.segments), default=0) + 1
    return Loaded(index, next_sequence, next_number, damaged)


def _in_order(index: FileIndex, entries: list[Entry], order: Order) -> int:
    """Put entries into the index, used longest ago first; returns the first free sequence number.

    An object that the order of use does not name counts as new if it was put after the order was written, by its
    sequence number, else as old.
    """
    places = {sequence: place for place, sequence in enumerate(order.sequences)}

    def age(entry: Entry) -> tuple[int, int]:
        place = places.get(entry.sequence)
        if place is not None:
            return 1, place
        return (2 if entry.sequence >= order.next_sequence else 0), entry.sequence

    for entry in sorted(entries, key=age):
        index.restore(entry)
    return max([order.next_sequence, *(entry.sequence + 1 for entry in entries)])


def why_not(name: str, folder: Path, error: OSError) -> StoreRejected | StoreUnavailable:
    """The error for a folder that cannot be used, in the system's words."""
    problem = f"{error.filename or folder}: {error.strerror or error}"
    if error.errno == errno.ENOLCK:
        return StoreRejected(name, problem, "its file system knows no locks: name a folder on a local disk")
    if error.errno in _WRONG_PLACE:
        return StoreRejected(name, problem, "name a folder, or a place for one, that this process may write to")
    return StoreUnavailable(name, problem)
