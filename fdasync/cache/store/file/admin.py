"""Look at every object in a file store's folder, check each, remove some: for the command line. Blocks; no loop.

`Folder` has the lock while it is used, so no engine writes meanwhile; `survey` needs no lock and changes nothing. It
knows no engine and prints nothing. `cli/store.py` calls it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.block_format import DamagedBlock, check_key, check_value, parse_key, read_header
from fdasync.cache.store.file.index import Entry, FileIndex, Segment
from fdasync.cache.store.file.io import clear_record, read_into
from fdasync.cache.store.file.layout import Record, Shape
from fdasync.cache.store.file.recovery import boot_id, list_folder, load, lock_holder, read_cap, scan_folder, take_lock
from fdasync.errors import BadInput, StoreRejected
from fdasync.ipc.shared_memory import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Found(msgspec.Struct, frozen=True):
    """An object on disk.

    Attributes:
        shape: of the segment that it lies in.
        slot: its place there.
        record: the slot's record.
    """

    shape: Shape
    slot: int
    record: Record

    @property
    def namespace(self) -> str:
        return namespace_of(self.record.key)


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """A folder at one moment.

    Attributes:
        objects: put last first.
        segments: every segment, believed or not.
        damaged: slots and segments that are damaged or not believed, each with its reason, by name.
        unknown: files that are not the store's; it leaves them alone.
        holder: the process that has the folder open, or "".
        cap_nbytes: the cap of the engine that opened the folder last; 0: not known; None: no engine ever opened it.
    """

    objects: list[Found]
    segments: list[Shape]
    damaged: dict[str, str]
    unknown: list[str]
    holder: str
    cap_nbytes: int | None


class Waste(msgspec.Struct, frozen=True):
    """What a clean-up would remove.

    Attributes:
        entries: objects to clear, without those in `segments`.
        segments: files to remove, with their objects.
        objects: how many objects of both kinds.
        nbytes: their bytes.
        disk_nbytes: bytes that the disk gets back.
    """

    entries: list[Entry]
    segments: list[Segment]
    objects: int
    nbytes: int
    disk_nbytes: int


def namespace_of(key: str) -> str:
    """The namespace in hex, or "" where the key is not a block's."""
    try:
        return parse_key(key)[0].hex()
    except BadInput:
        return ""


def check_is_store(folder: Path) -> None:
    """Raises StoreRejected for a folder that no file store ever used; OSError."""
    if not list_folder(folder).segments and read_cap(folder) is None:
        raise StoreRejected("file", f"{folder} is no file store", "name the folder that the engine was given")


def survey(folder: Path) -> Survey:
    """The folder as it is now; an engine may be using it. Raises StoreRejected, OSError."""
    check_is_store(folder)
    listing, scans = scan_folder(folder)
    damaged: dict[str, str] = {}
    objects: dict[str, Found] = {}
    for scan in scans:
        if scan.problem:
            damaged[scan.shape.name] = scan.problem
            continue
        damaged |= {f"{scan.shape.name} slot {slot}": problem for slot, problem in scan.damaged.items()}
        for slot, record in scan.records.items():
            other = objects.get(record.key)
            if other is None or other.record.sequence < record.sequence:
                objects[record.key] = Found(scan.shape, slot, record)
    return Survey(
        objects=sorted(objects.values(), key=lambda found: -found.record.sequence),
        segments=[scan.shape for scan in scans],
        damaged=damaged,
        unknown=listing.unknown,
        holder=lock_holder(folder),
        cap_nbytes=read_cap(folder),
    )


def content_of(folder: Path, found: Found) -> str:
    """The kind of an object in words, from its first page."""
    if not found.namespace:
        return "other bytes"
    page = bytearray(min(PAGE_NBYTES, found.record.nbytes))
    try:
        fd = os.open(folder / found.shape.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = read_into(fd, found.shape.value_at(found.slot), [memoryview(page)])
        finally:
            os.close(fd)
        header = read_header(page, found.record.nbytes)
    except (OSError, DamagedBlock) as error:
        return str(error)
    names = "+".join(section.name for section in header.sections)
    return f"{names} {header.kv_dtype} {header.block_tokens} tokens" if whole else "cut off"


class Folder:
    """A file store's folder, locked; a context manager. Raises StoreRejected while an engine has it open, OSError.

    Attributes:
        index: the objects and segments of the folder.
        damaged: slots and segments that are damaged or not believed, each with its reason, by name.
    """

    def __init__(self, folder: Path) -> None:
        check_is_store(folder)
        self._folder = folder
        self._lock_fd = take_lock(folder, "file", read_cap(folder))
        try:
            before = survey(folder)
            self.damaged = dict(before.damaged)
            self.index: FileIndex = load(folder, 0, 0, boot_id()).index
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._touched: set[int] = set()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        for segment in self.index.segments():
            if segment.fd in self._touched:
                with contextlib.suppress(OSError):  # a removed object may come back after loss of power, whole
                    os.fdatasync(segment.fd)
            os.close(segment.fd)
        os.close(self._lock_fd)

    def check_objects(self) -> Iterator[tuple[Entry, str | None]]:
        """Read every object, in the order of the disk, and yield it with its problem: "": it has none; None: it is no
        block, so its bytes cannot be checked. Raises OSError for a failure that does not concern one object."""
        buffer = bytearray()
        for entry in sorted(self.index.entries(), key=lambda one: (one.segment.shape.number, one.slot)):
            if len(buffer) < entry.nbytes:
                buffer = bytearray(entry.nbytes)
            with memoryview(buffer) as whole, whole[: entry.nbytes] as value:
                yield entry, self._check(entry, value)

    def _check(self, entry: Entry, value: memoryview) -> str | None:
        try:
            if not read_into(entry.segment.fd, entry.segment.shape.value_at(entry.slot), [value]):
                return "its segment ends before it does"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        try:
            parse_key(entry.key)
        except BadInput:
            return None
        try:
            header = read_header(value[:PAGE_NBYTES], entry.nbytes)
            check_key(header, entry.key)
            check_value(header, value)
        except DamagedBlock as error:
            return str(error)
        return ""

    def delete(self, entry: Entry) -> None:
        """Remove an object. Raises OSError."""
        clear_record(entry.segment.fd, entry.segment.shape, entry.slot)
        self._touched.add(entry.segment.fd)
        self.index.forget(entry)
        self.index.release(entry.segment, entry.slot, stale=False)

    def clear_damaged(self) -> int:
        """Empty slots whose record is damaged, and remove segments that are not believed; how many of both."""
        count = 0
        for segment in list(self.index.segments()):
            if not segment.believed:
                self.drop(segment)
                count += 1
            for slot in sorted(segment.stale):
                clear_record(segment.fd, segment.shape, slot)
                self._touched.add(segment.fd)
                count += 1
            segment.stale.clear()
        return count

    def find_waste(self, unwanted: Callable[[Entry], bool], max_nbytes: int | None) -> Waste:
        """Unwanted objects, segments that would be empty then, and the segments used longest ago, as many as bring the
        files down to `max_nbytes`. Removes nothing."""
        entries = [entry for entry in self.index.entries() if unwanted(entry)]
        left = {segment: len(segment.entries) for segment in self.index.segments()}
        for entry in entries:
            left[entry.segment] -= 1
        segments = [segment for segment, count in left.items() if not count]
        total = self.index.total_nbytes - sum(segment.shape.nbytes for segment in segments)
        for segment, count in left.items():
            if max_nbytes is not None and total > max_nbytes and count:
                segments.append(segment)
                total -= segment.shape.nbytes
        whole = [entry for segment in segments for entry in segment.entries.values()]
        entries = [entry for entry in entries if entry.segment not in segments]
        nbytes = sum(entry.nbytes for entry in [*entries, *whole])
        return Waste(
            entries=entries,
            segments=segments,
            objects=len(entries) + len(whole),
            nbytes=nbytes,
            disk_nbytes=self.index.total_nbytes - total,
        )

    def remove(self, waste: Waste) -> None:
        """Remove what `find_waste` found. Raises OSError, which leaves the rest."""
        for entry in waste.entries:
            self.delete(entry)
        for segment in waste.segments:
            self.drop(segment)

    def drop(self, segment: Segment) -> None:
        """Remove a segment file with its objects. Raises OSError."""
        (self._folder / segment.shape.name).unlink()
        self.index.remove_segment(segment)
        self._touched.discard(segment.fd)
        os.close(segment.fd)
