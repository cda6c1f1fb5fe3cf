"""The object that a store keeps for one block and rank: self-describing, and checked before it is used.

On disk: a header page, then the sections (KV first, then one for each aux spec, and behind those the recurrent state
of a block that carries it), each at a multiple of 4 KiB. The page is little-endian: magic (8 bytes), format version
(uint32), length of the table (uint32), length of the whole object (uint64), the table (`BlockHeader`, msgpack), zeros,
and in its last 8 bytes the XXH3-64 of all before. The table names what the block is (namespace, key, rank, layout,
dtypes, shapes) and the XXH3-64 of every section. Between sections are zeros. An object of another version is damage
like any other: stores are caches, nothing is migrated.

Pure functions over bytes, which know no store, no file and no loop. `checked.py`, which writes and checks objects
around any store, and `file/admin.py`, which verifies a folder, call them.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import xxhash

from fdasync.errors import BadInput, PermanentError
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, page_aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"fdablock"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_TABLE_MAX_NBYTES = PAGE_NBYTES - _PREAMBLE.size - _CHECKSUM.size
_KEY = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})\.(0|[1-9][0-9]{0,8})")
MAX_RANK = 10**9 - 1

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


DamageReason = Literal[
    "magic", "version", "length", "header", "namespace", "key", "rank", "layout", "kv_dtype", "block_tokens",
    "sections", "checksum", "padding", "store",
]  # fmt: skip


class DamagedBlock(PermanentError):
    """Stored bytes are not the block that they should be.

    Attributes:
        reason: the check that failed; "store": the store itself found the damage.
        detail: in words.
    """

    def __init__(self, reason: DamageReason, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


# -- keys -------------------------------------------------------------------------------------------


def object_key(namespace: bytes, key: bytes, rank: int = 0) -> str:
    """The store's key of a block: "<namespace>/<key>.<rank>", 16 bytes each in hex. Raises BadInput."""
    if len(namespace) != 16 or len(key) != 16 or not 0 <= rank <= MAX_RANK:
        raise BadInput("key", f"a block is named by 16 + 16 bytes and a rank, not {namespace!r}, {key!r}, {rank}")
    return f"{namespace.hex()}/{key.hex()}.{rank}"


def is_object_key(key: str) -> bool:
    """Whether `object_key` can make it."""
    return _KEY.fullmatch(key) is not None


def parse_key(key: str) -> tuple[bytes, bytes, int]:
    """Namespace, key and rank again. Raises BadInput for anything that `object_key` does not make."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise BadInput("key", f"{key!r} is not the key of a block")
    return bytes.fromhex(found[1]), bytes.fromhex(found[2]), int(found[3])


# -- what a block is --------------------------------------------------------------------------------


class Section(msgspec.Struct, frozen=True, array_like=True):
    """One run of bytes of an object.

    Attributes:
        name: "kv", the name of an aux spec, or "state".
        dtype, shape: compared with the schema's, never interpreted.
        nbytes: without padding, at least 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class BlockSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What every object of one engine is; sent to the store's process.

    Attributes:
        layout: name of the KV layout: compared only.
        kv_dtype: e.g. "bfloat16": compared only.
        block_tokens: tokens of a block.
        sections: the first is "kv", then one for each aux spec.
        state: the section behind those in the objects of some blocks; None: no block carries recurrent state. A
            block's key decides whether it has it: the writer and every reader must agree (`state_every_tokens` is a
            part of the namespace).
        zeros: a page of zeros, never written; padding is written from it.
        trash: a page that padding is read into; its bytes are never used.
    """

    layout: str
    kv_dtype: str
    block_tokens: int
    sections: tuple[Section, ...]
    zeros: Part
    trash: Part
    state: Section | None = None

    def layout_of(self, *, with_state: bool) -> tuple[Section, ...]:
        """The sections of an object, with the state's or without."""
        return (*self.sections, self.state) if with_state and self.state is not None else self.sections

    @property
    def object_nbytes(self) -> int:
        """Bytes of a whole object without a state: header page, sections, padding."""
        return self.nbytes_of(with_state=False)

    def nbytes_of(self, *, with_state: bool) -> int:
        """Bytes of a whole object, with the state's section or without."""
        sections = self.layout_of(with_state=with_state)
        return PAGE_NBYTES + sum(page_aligned(section.nbytes) for section in sections)


class SectionEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A section as it lies in an object.

    Attributes:
        name, dtype, shape, nbytes: as in `Section`.
        offset: of its first byte in the object.
        checksum: XXH3-64 of its bytes without padding.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    nbytes: Count
    checksum: int


class BlockHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The table of an object.

    Attributes:
        namespace, key, rank: the block that the object is; `object_key` makes them one string.
        layout, kv_dtype, block_tokens: as in `BlockSchema`.
        sections: in the order in which they lie.
    """

    namespace: Id
    key: Id
    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
    layout: str
    kv_dtype: str
    block_tokens: Count
    sections: tuple[SectionEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return PAGE_NBYTES + sum(page_aligned(section.nbytes) for section in self.sections)


def make_header(schema: BlockSchema, key: str, checksums: Sequence[int]) -> BlockHeader:
    """The header of an object with this key whose sections have these checksums; with one more than `schema.sections`
    it has the state's section, too. Raises BadInput."""
    entries = []
    offset = PAGE_NBYTES
    sections = schema.layout_of(with_state=len(checksums) > len(schema.sections))
    for section, checksum in zip(sections, checksums, strict=True):
        entries.append(
            SectionEntry(
                name=section.name,
                dtype=section.dtype,
                shape=section.shape,
                offset=offset,
                nbytes=section.nbytes,
                checksum=checksum,
            )
        )
        offset += page_aligned(section.nbytes)
    namespace, block, rank = parse_key(key)
    return BlockHeader(
        namespace=namespace,
        key=block,
        rank=rank,
        layout=schema.layout,
        kv_dtype=schema.kv_dtype,
        block_tokens=schema.block_tokens,
        sections=tuple(entries),
    )


def write_header(header: BlockHeader) -> bytes:
    """The header page. Raises BadInput if the table does not fit into it."""
    table = msgspec.msgpack.encode(header)
    if len(table) > _TABLE_MAX_NBYTES:
        raise BadInput("sections", f"the table of a block takes {len(table)} bytes", limit=_TABLE_MAX_NBYTES)
    page = (_PREAMBLE.pack(MAGIC, VERSION, len(table), header.nbytes) + table).ljust(PAGE_NBYTES - 8, b"\0")
    return page + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))


def read_header(page: bytes | bytearray | memoryview, nbytes: int | None = None) -> BlockHeader:
    """The header in the first 4096 bytes of an object, which has `nbytes` if that is given.

    Nothing is decoded before the page's own checksum holds. Raises DamagedBlock and nothing else, whatever the bytes.
    """
    # a copy: the checked bytes cannot change before they are decoded
    page = bytes(page)
    if len(page) != PAGE_NBYTES:
        raise DamagedBlock("length", f"{len(page)} bytes are no header page")
    magic, version, table_nbytes, object_nbytes = _PREAMBLE.unpack_from(page)
    if magic != MAGIC:
        raise DamagedBlock("magic", f"it starts with {magic!r}")
    if version != VERSION:
        raise DamagedBlock("version", f"the format is {version}, not {VERSION}")
    if nbytes is not None and object_nbytes != nbytes:
        raise DamagedBlock("length", f"it says {object_nbytes} bytes and has {nbytes}")
    if table_nbytes > _TABLE_MAX_NBYTES:
        raise DamagedBlock("length", f"a table of {table_nbytes} bytes does not fit into a page")
    (checksum,) = _CHECKSUM.unpack_from(page, PAGE_NBYTES - 8)
    if xxhash.xxh3_64_intdigest(page[:-8]) != checksum:
        raise DamagedBlock("header", "its checksum is wrong")
    try:
        header = msgspec.msgpack.decode(page[_PREAMBLE.size : _PREAMBLE.size + table_nbytes], type=BlockHeader)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedBlock("header", f"its table cannot be decoded: {error}") from None
    offset = PAGE_NBYTES
    for section in header.sections:
        if section.offset != offset:
            raise DamagedBlock("sections", f"section {section.name!r} is said to be at {section.offset}, not {offset}")
        offset += page_aligned(section.nbytes)
    if offset != object_nbytes:
        raise DamagedBlock("length", f"the sections end at {offset} of {object_nbytes} bytes")
    return header


def check_key(header: BlockHeader, key: str) -> None:
    """Raise DamagedBlock unless this is the header of the object with this key; BadInput for no key of a block."""
    namespace, block, rank = parse_key(key)
    if header.namespace != namespace:
        raise DamagedBlock("namespace", f"it says {header.namespace.hex()}, and lies at {key}")
    if header.key != block:
        raise DamagedBlock("key", f"it says {header.key.hex()}, and lies at {key}")
    if header.rank != rank:
        raise DamagedBlock("rank", f"it says {header.rank}, and lies at {key}")


def check_schema(header: BlockHeader, schema: BlockSchema, *, with_state: bool = False) -> None:
    """Raise DamagedBlock unless an engine with this schema can use what the header describes, of a block that carries a
    state or not."""
    names: tuple[Literal["layout", "kv_dtype", "block_tokens"], ...] = ("layout", "kv_dtype", "block_tokens")
    for name in names:
        found, wanted = getattr(header, name), getattr(schema, name)
        if found != wanted:
            raise DamagedBlock(name, f"it is {found!r}, not {wanted!r}")
    sections = tuple([Section(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header.sections])
    if sections != schema.layout_of(with_state=with_state):
        found = ", ".join(f"{section.name} {section.dtype} {list(section.shape)}" for section in sections)
        raise DamagedBlock("sections", f"it has {found or 'none'}")


def check_value(header: BlockHeader, value: bytes | bytearray | memoryview) -> None:
    """Raise DamagedBlock unless the sections of a whole object, and the padding, are what its header says."""
    with memoryview(value).cast("B") as view:
        if len(view) != header.nbytes:
            raise DamagedBlock("length", f"it has {len(view)} bytes of {header.nbytes}")
        for section in header.sections:
            end = section.offset + section.nbytes
            if xxhash.xxh3_64_intdigest(view[section.offset : end]) != section.checksum:
                raise DamagedBlock("checksum", f"section {section.name!r} is not what was written")
            if bytes(view[end : page_aligned(end)]).strip(b"\0"):
                raise DamagedBlock("padding", f"the bytes behind section {section.name!r} are not zeros")
