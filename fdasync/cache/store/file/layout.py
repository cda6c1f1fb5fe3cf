"""The bytes of a file store's folder: encode and decode, no I/O. `docs/file-store.md` draws it.

Objects live in *slots* of equal stride in *segment* files. A segment is a head page, a table with one record per
slot, and the slots. A slot holds an object exactly if its record is whole; so an object appears when its record is
written, after its bytes, and is gone when the record is cleared, before they change.

    | head, 4096 | record 0, 512 | record 1 | ... padded to 4096 | slot 0, stride | slot 1 | ...

The table stands in front, not each record at its slot, so that a start reads one run of bytes per segment.
This module does not know what the bytes of an object mean. The other modules of `file/` use it.
"""

from __future__ import annotations

import re
import struct

import msgspec
import xxhash

from fdasync.errors import PermanentError
from fdasync.ipc.shared_memory import PAGE_NBYTES, page_aligned

VERSION = 1
RECORD_NBYTES = 512
EMPTY_RECORD = bytes(RECORD_NBYTES)
LOCK_NAME = "lock"
ORDER_NAME = "order"
TEMPORARY_SUFFIX = ".new"
# the boot in the head of a segment whose writes are all on the disk
CLEAN = bytes(16)
MAX_KEY_CHARS = 200

_HEAD = struct.Struct("<8sIIQQ16s")
_HEAD_MAGIC = b"fdasyseg"
_RECORD = struct.Struct("<8sHHIQQQQ")
_RECORD_MAGIC = b"fdasyrec"
_ORDER_MAGIC = b"fdasyord"
_CHECKSUM = struct.Struct("<Q")
_NAME = re.compile(r"([1-9][0-9]{3,14})-([1-9][0-9]{0,8})-([0-9]{8,15})\.seg")


class LayoutError(PermanentError):
    """Bytes of a file store that are not what they should be.

    Attributes:
        problem: in words.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


class Shape(msgspec.Struct, frozen=True):
    """The layout of one segment file. It stands in the file's name, so that it is known when the head is damaged.

    Attributes:
        stride: bytes of a slot, whole pages.
        slots: how many slots.
        number: of the segment; never used twice in a folder.
    """

    stride: int
    slots: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.stride}-{self.slots}-{self.number:08d}.seg"

    @property
    def table_nbytes(self) -> int:
        """Bytes of head and records, padded: what a start reads."""
        return PAGE_NBYTES + page_aligned(self.slots * RECORD_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.table_nbytes + self.slots * self.stride

    def record_at(self, slot: int) -> int:
        """Where the record of a slot begins."""
        return PAGE_NBYTES + slot * RECORD_NBYTES

    def value_at(self, slot: int) -> int:
        """Where the bytes of a slot begin."""
        return self.table_nbytes + slot * self.stride


def parse_name(name: str) -> Shape | None:
    """The shape in a segment's file name; None: it is no segment's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    shape = Shape(*(int(part) for part in match.groups()))
    return shape if shape.stride % PAGE_NBYTES == 0 and shape.name == name else None


def slots_within(stride: int, nbytes: int) -> int:
    """How many slots of this stride fit in a segment file of `nbytes`; may be 0."""
    slots = (nbytes - PAGE_NBYTES) // (stride + RECORD_NBYTES)
    while slots > 0 and Shape(stride, slots, 0).nbytes > nbytes:
        slots -= 1
    return max(slots, 0)


def least_nbytes(value_nbytes: int) -> int:
    """The smallest segment file that holds one object of this size."""
    # a head, a table of one record, a slot
    return 2 * PAGE_NBYTES + page_aligned(value_nbytes)


# -- the head of a segment ----------------------------------------------------------------------


def encode_head(shape: Shape, boot: bytes) -> bytes:
    """One page. `boot`: 16 bytes that name the boot of the machine whose writes to this segment the disk may lack;
    `CLEAN`: it lacks none."""
    body = _HEAD.pack(_HEAD_MAGIC, VERSION, shape.slots, shape.stride, shape.number, boot)
    return (body + _checksum(body)).ljust(PAGE_NBYTES, b"\0")


def decode_head(page: bytes, shape: Shape) -> bytes:
    """The boot in the head of a segment of this shape. Raises LayoutError."""
    body, checksum = page[: _HEAD.size], page[_HEAD.size : _HEAD.size + _CHECKSUM.size]
    if len(body) < _HEAD.size or checksum != _checksum(body):
        raise LayoutError("its head is damaged")
    magic, version, slots, stride, number, boot = _HEAD.unpack(body)
    if magic != _HEAD_MAGIC:
        raise LayoutError("it is no segment of a file store")
    if version != VERSION:
        raise LayoutError(f"it has layout version {version}, {VERSION} is known here")
    if (stride, slots, number) != (shape.stride, shape.slots, shape.number):
        raise LayoutError("its head and its name disagree")
    return bytes(boot)


# -- the records of slots -----------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, gc=False):
    """An object in a slot.

    Attributes:
        key: its key.
        nbytes: of its value, without padding.
        sequence: number of the put; grows with every put into the folder.
        written_ns: time of the put, in nanoseconds since 1970, by the clock of the machine.
    """

    key: str
    nbytes: int
    sequence: int
    written_ns: int


def encode_record(record: Record, shape: Shape, slot: int) -> bytes:
    """512 bytes for this slot and no other: a record that lands elsewhere is not believed there."""
    key = record.key.encode("ascii")
    fixed = _RECORD.pack(
        _RECORD_MAGIC, VERSION, len(key), slot, shape.number, record.sequence, record.nbytes, record.written_ns
    )
    body = (fixed + key).ljust(RECORD_NBYTES - _CHECKSUM.size, b"\0")
    return body + _checksum(body)


def decode_record(data: bytes, shape: Shape, slot: int) -> Record | None:
    """The object in this slot; None: the slot is empty. Raises LayoutError for anything else."""
    if data == EMPTY_RECORD:
        return None
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if len(data) != RECORD_NBYTES or checksum != _checksum(body):
        raise LayoutError("its record is damaged")
    magic, version, key_nbytes, own_slot, number, sequence, nbytes, written_ns = _RECORD.unpack_from(body)
    if magic != _RECORD_MAGIC or version != VERSION:
        raise LayoutError("its record is of another kind or version")
    if (number, own_slot) != (shape.number, slot):
        raise LayoutError(f"its record belongs to slot {own_slot} of segment {number}")
    if not 1 <= key_nbytes <= MAX_KEY_CHARS or not 1 <= nbytes <= shape.stride:
        raise LayoutError("its record names impossible sizes")
    try:
        key = body[_RECORD.size : _RECORD.size + key_nbytes].decode("ascii")
    except UnicodeDecodeError:
        raise LayoutError("the key in its record is no text") from None
    return Record(key, nbytes, sequence, written_ns)


# -- the order of use ---------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The order in which objects were used, so that eviction survives a restart. A hint: records are the truth.

    Attributes:
        next_sequence: objects with this sequence number or a later one were put after the order was written.
        sequences: sequence numbers of the objects, used longest ago first.
    """

    next_sequence: int
    sequences: list[int]


def encode_order(order: Order) -> bytes:
    """The whole file."""
    body = _ORDER_MAGIC + msgspec.msgpack.encode(order)
    return body + _checksum(body)


def decode_order(data: bytes) -> Order:
    """Raises LayoutError."""
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if not body.startswith(_ORDER_MAGIC) or checksum != _checksum(body):
        raise LayoutError("the order of use is damaged")
    try:
        return msgspec.msgpack.decode(body[len(_ORDER_MAGIC) :], type=Order)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise LayoutError(f"the order of use cannot be read: {error}") from None


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))
