"""The order of writes that makes a put crash-safe: objects that are written together, each there whole or not at all.

Its functions block, and know no index. They run in the threads of `file/store.py`; the syscalls are those of `io.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.base import Item, Moves
from fdasync.cache.store.file.io import IoError, write_from
from fdasync.cache.store.file.layout import EMPTY_RECORD, Record, Shape, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class WriteSlot(msgspec.Struct, frozen=True):
    """One object to be written to a slot.

    Attributes:
        fd, shape: of the segment.
        slot: its place there.
        stale: clear the slot's record first.
        record: the object's.
        item: where its bytes are.
        moves: gives them, piece by piece.
    """

    fd: int
    shape: Shape
    slot: int
    stale: bool
    record: Record
    item: Item
    moves: Moves


class Written(msgspec.Struct, frozen=True):
    """How the write of one slot ended.

    Attributes:
        trouble: the syscall that failed; None: none did.
        stale: the slot may have a record, of the old object or of this one.
        kept: the bytes of the slot are as they were.
        skipped: the write was not begun, as its caller went away.
    """

    trouble: IoError | None = None
    stale: bool = False
    kept: bool = False
    skipped: bool = False


def write_slots(slots: Sequence[WriteSlot], stopped: Callable[[], bool], *, synced: bool) -> list[Written]:
    """Write objects, in the order of their places, so that each is there whole or not at all, wherever this process
    ends; with `synced` wherever the machine ends.

    Of each object: clear the record of a slot that was used, write the bytes; then write the records. Records of
    neighbouring slots are neighbours in the table, and are written in one call. After `stopped()`, no object is begun,
    and what lies in its slot stays. With `synced` these are three rounds over all objects, each on the disk before the
    next begins, and all objects are begun or none.
    """
    if stopped():
        return [Written(stale=slot.stale, kept=True, skipped=True) for slot in slots]
    ended: dict[int, Written] = {}

    def trouble(number: int, error: OSError, *, stale: bool, kept: bool) -> None:
        ended[number] = Written(IoError.of(error), stale, kept)

    def sync(numbers: list[int], *, kept: bool) -> None:
        for fd in dict.fromkeys(slots[number].fd for number in numbers) if synced else ():
            try:
                os.fdatasync(fd)
            except OSError as error:
                for number in numbers:
                    if slots[number].fd == fd:
                        trouble(number, error, stale=True, kept=kept)

    def write_records(numbers: list[int], record: Callable[[WriteSlot], bytes], *, kept: bool) -> None:
        for run in _neighbours(slots, numbers):
            try:
                _write_records([slots[number] for number in run], record)
            except OSError:
                # one by one: each has an outcome of its own
                for number in run:
                    try:
                        _write_records([slots[number]], record)
                    except OSError as error:
                        trouble(number, error, stale=True, kept=kept)
        sync(numbers, kept=kept)

    if synced:
        write_records([number for number, slot in enumerate(slots) if slot.stale], _empty, kept=True)
    begun = []
    for number, slot in enumerate(slots):
        if number in ended:
            continue
        kept = not synced
        if kept and stopped():
            ended[number] = Written(stale=slot.stale, kept=True, skipped=True)
            continue
        try:
            if kept and slot.stale:
                _write_records([slot], _empty)
            kept = False
            _write_value(slot)
        except OSError as error:
            trouble(number, error, stale=kept and slot.stale, kept=kept)
        else:
            begun.append(number)
    sync(begun, kept=False)
    write_records(
        [number for number in begun if number not in ended],
        lambda slot: encode_record(slot.record, slot.shape, slot.slot),
        kept=False,
    )
    return [ended.get(number) or Written() for number in range(len(slots))]


def runs_of(slots: Sequence[WriteSlot], most: int) -> list[list[WriteSlot]]:
    """Slots in the order of their places, cut into runs of at most `most` neighbours."""
    return [
        [slots[number] for number in run[first : first + most]]
        for run in _neighbours(slots, range(len(slots)))
        for first in range(0, len(run), most)
    ]


def _neighbours(slots: Sequence[WriteSlot], numbers: Iterable[int]) -> list[list[int]]:
    """Numbers of slots, cut where the next slot does not lie right behind the one before."""
    runs: list[list[int]] = []
    last: WriteSlot | None = None
    for number in numbers:
        slot = slots[number]
        if last is not None and (slot.fd, slot.slot) == (last.fd, last.slot + 1):
            runs[-1].append(number)
        else:
            runs.append([number])
        last = slot
    return runs


def _empty(_: WriteSlot) -> bytes:
    return EMPTY_RECORD


def _write_value(slot: WriteSlot) -> None:
    fd, begin = slot.fd, slot.shape.value_at(slot.slot)
    for offset, views in slot.moves.leave(slot.item):
        write_from(fd, begin + offset, views)


def _write_records(run: list[WriteSlot], record: Callable[[WriteSlot], bytes]) -> None:
    """Write the records of neighbouring slots in one call. Raises OSError."""
    first = run[0]
    write_from(first.fd, first.shape.record_at(first.slot), [memoryview(b"".join([record(slot) for slot in run]))])
