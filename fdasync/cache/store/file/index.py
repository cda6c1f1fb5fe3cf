"""The index of a file store's folder: objects, free slots, the order of use, and what is evicted next. Pure.

Slots of one stride form a class. A slot is free, claimed (a put is writing it), or holds an entry; an entry that
was forgotten while it was read keeps its slot until the last reader is done. The least recently used object of a
class makes room for the next one, unless a whole segment of another class was used longer ago still.

It does no I/O and holds no bytes. `file/store.py` and `file/allocator.py` use it on their loop, `file/admin.py` for
the command line.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.file.layout import least_nbytes, slots_within
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.cache.store.file.layout import Shape


class Entry:
    """An object.

    Attributes:
        key: its key.
        segment, slot: where it lies.
        nbytes: of its value.
        sequence, written_ns: as in `Record`.
        used: number of its last use, which grows with every use of any object.
        ref_count: readers.
        gone: forgotten; its slot becomes free when the last reader is done.
    """

    __slots__ = ("gone", "key", "nbytes", "ref_count", "segment", "sequence", "slot", "used", "written_ns")

    def __init__(self, key: str, segment: Segment, slot: int, nbytes: int, sequence: int, written_ns: int) -> None:
        self.key = key
        self.segment = segment
        self.slot = slot
        self.nbytes = nbytes
        self.sequence = sequence
        self.written_ns = written_ns
        self.used = 0
        self.ref_count = 0
        self.gone = False


class Segment:
    """A segment file.

    Attributes:
        shape: how the file is laid out.
        fd: open for reading and writing, or -1; owned by the maker of this object.
        boot: the boot in its head (`layout.encode_head`).
        believed: False: its objects cannot be trusted, none is indexed, and it goes before any other segment.
        entries: by slot.
        free: slots without an entry, to be taken from the end.
        stale: free slots whose record on disk may still name an object: cleared before their bytes change.
        busy: claimed slots and pins of entries; it cannot be dropped while there are any.
        used: number of the last use of any of its objects.
    """

    __slots__ = ("believed", "boot", "busy", "entries", "fd", "free", "shape", "stale", "used")

    def __init__(self, shape: Shape, fd: int, boot: bytes, *, believed: bool = True) -> None:
        self.shape = shape
        self.fd = fd
        self.boot = boot
        self.believed = believed
        self.entries: dict[int, Entry] = {}
        self.free: list[int] = []
        self.stale: set[int] = set()
        self.busy = 0
        self.used = 0


class Place(msgspec.Struct, frozen=True):
    """A claimed slot.

    Attributes:
        segment, slot: where it is.
        stale: clear its record first.
        evicted: the object that it holds until the record is cleared, or None. Its key stays claimed until then: put
            elsewhere and deleted, the object could come back with a crash.
    """

    segment: Segment
    slot: int
    stale: bool
    evicted: Entry | None = None


class Grow(msgspec.Struct, frozen=True):
    """Make a segment with this many slots, and call `find` again."""

    slots: int


class Drop(msgspec.Struct, frozen=True):
    """Remove this segment, and call `find` again."""

    segment: Segment


class FileIndex:
    """Objects and room.

    Args:
        max_nbytes: the cap: most bytes of all segment files.
        segment_nbytes: size of a new segment, unless a single object needs more or the cap leaves less.

    Attributes:
        max_nbytes, segment_nbytes: as given.
        limit_nbytes: the cap, or less while the disk has no room for more.
        total_nbytes: bytes of all segment files.
        nbytes: bytes of all objects.
    """

    def __init__(self, max_nbytes: int, segment_nbytes: int) -> None:
        self.max_nbytes = self.limit_nbytes = max_nbytes
        self.segment_nbytes = segment_nbytes
        self.total_nbytes = 0
        self.nbytes = 0
        self._ticks = 0
        self._entries: dict[str, Entry] = {}
        # by stride, used longest ago first
        self._classes: dict[int, OrderedDict[str, Entry]] = {}
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._with_room: dict[int, dict[int, Segment]] = {}

    # -- objects

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """All, used longest ago first."""
        return sorted(self._entries.values(), key=lambda entry: entry.used)

    def add(self, entry: Entry) -> None:
        """Index the object in a claimed slot, as used just now."""
        entry.segment.busy -= 1
        self.restore(entry)

    def restore(self, entry: Entry) -> None:
        """Index an object that was found on disk, or that could not be removed from it."""
        entry.segment.entries[entry.slot] = entry
        entry.gone = False
        self._entries[entry.key] = entry
        self._classes.setdefault(entry.segment.shape.stride, OrderedDict())[entry.key] = entry
        self.nbytes += entry.nbytes
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        self._ticks += 1
        entry.used = entry.segment.used = self._ticks
        self._classes[entry.segment.shape.stride].move_to_end(entry.key)
        self._segments.move_to_end(entry.segment.shape.number)

    def forget(self, entry: Entry) -> None:
        """Take an object out of the index. Its slot stays taken until `release`."""
        del self._entries[entry.key]
        del self._classes[entry.segment.shape.stride][entry.key]
        self.nbytes -= entry.nbytes
        entry.gone = True

    def pin(self, entry: Entry) -> None:
        """Count a reader: the slot gets no other writer until `unpin`."""
        entry.ref_count += 1
        entry.segment.busy += 1

    def unpin(self, entry: Entry) -> bool:
        """Take a reader off. True: the object was forgotten meanwhile and this was its last reader, so `release` its
        slot now."""
        entry.ref_count -= 1
        entry.segment.busy -= 1
        return entry.gone and not entry.ref_count

    # -- slots

    def find(self, stride: int) -> Place | Grow | Drop | None:
        """Claim a slot for an object of this stride, or say what to do first; None: there can be none now."""
        for segment in self._with_room.get(stride, {}).values():
            return self._claim(segment)
        left = self.limit_nbytes - self.total_nbytes
        # an object larger than a segment has one of its own
        if left >= least_nbytes(stride):
            return Grow(slots_within(stride, min(self.segment_nbytes, left)) or 1)
        own = next((entry for entry in self._classes.get(stride, {}).values() if not entry.ref_count), None)
        cold = self._coldest(stride, own) if self.limit_nbytes >= least_nbytes(stride) else None
        if cold is not None:
            return Drop(cold)
        if own is None:
            return None
        self.forget(own)
        del own.segment.entries[own.slot]
        own.segment.busy += 1
        return Place(own.segment, own.slot, True, own)

    def give_back(self, place: Place, *, stale: bool, kept: bool) -> None:
        """Give back a claimed slot that was not filled. `kept`: the evicted object's bytes are as they were."""
        place.segment.busy -= 1
        if kept and place.evicted is not None:
            self.restore(place.evicted)
        else:
            self.release(place.segment, place.slot, stale=stale)

    def release(self, segment: Segment, slot: int, *, stale: bool) -> None:
        """Make a slot free. `stale`: its record may still name an object."""
        segment.entries.pop(slot, None)
        segment.free.append(slot)
        if stale:
            segment.stale.add(slot)
        if not segment.entries and not segment.busy:
            segment.used = 0  # empty: no object is lost with it
            self._segments.move_to_end(segment.shape.number, last=False)
        self._with_room.setdefault(segment.shape.stride, {})[segment.shape.number] = segment

    def _claim(self, segment: Segment) -> Place:
        slot = segment.free.pop()
        if not segment.free:
            del self._with_room[segment.shape.stride][segment.shape.number]
        segment.busy += 1
        stale = slot in segment.stale
        segment.stale.discard(slot)
        return Place(segment, slot, stale)

    # -- segments

    def segments(self) -> Iterator[Segment]:
        """All, used longest ago first."""
        return iter(self._segments.values())

    def add_segment(self, segment: Segment) -> None:
        """Add a segment that exists, with its free slots."""
        self._segments[segment.shape.number] = segment
        self.total_nbytes += segment.shape.nbytes
        if segment.free:
            self._with_room.setdefault(segment.shape.stride, {})[segment.shape.number] = segment
        if not segment.entries:
            self._segments.move_to_end(segment.shape.number, last=False)

    def remove_segment(self, segment: Segment) -> None:
        """Forget a segment and its objects, before the file is unlinked."""
        if segment.busy:
            raise InvariantBroken(f"{segment.shape.name} is in use and was to be dropped")
        for entry in list(segment.entries.values()):
            if not entry.gone:
                self.forget(entry)
        del self._segments[segment.shape.number]
        self._with_room.get(segment.shape.stride, {}).pop(segment.shape.number, None)
        self.total_nbytes -= segment.shape.nbytes

    def coldest(self) -> Segment | None:
        """The least recently used of the segments that can be dropped now."""
        return next((segment for segment in self.segments() if not segment.busy), None)

    def _coldest(self, stride: int, own: Entry | None) -> Segment | None:
        """A segment that should go before `own`, the object of this class used longest ago."""
        for segment in self.segments():
            if segment.busy:
                continue
            if not segment.believed or (segment.shape.stride != stride and (own is None or segment.used < own.used)):
                return segment
            if own is not None and segment.used >= own.used:
                return None  # those behind it were used later still
        return None

    def check(self) -> None:
        """Raise InvariantBroken unless objects, slots and sizes add up."""
        if self.total_nbytes != sum(segment.shape.nbytes for segment in self._segments.values()):
            raise InvariantBroken("the sizes of segments do not add up")
        if self.nbytes != sum(entry.nbytes for entry in self._entries.values()):
            raise InvariantBroken("the sizes of objects do not add up")
        for key, entry in self._entries.items():
            if entry.key != key or entry.gone or entry.segment.entries.get(entry.slot) is not entry:
                raise InvariantBroken(f"{key} is not where the index says")
        for segment in self._segments.values():
            slots = [*segment.free, *segment.entries]
            if len(set(slots)) != len(slots) or not segment.stale <= set(segment.free):
                raise InvariantBroken(f"a slot of {segment.shape.name} is free twice, or free and taken")
            claimed = segment.busy - sum(entry.ref_count for entry in segment.entries.values())
            if segment.believed and len(slots) + claimed != segment.shape.slots:
                raise InvariantBroken(f"{segment.shape.name} lost a slot, or has one too many")
        strides = [key for entries in self._classes.values() for key in entries]
        if sorted(strides) != sorted(self._entries):
            raise InvariantBroken("classes and index disagree")
