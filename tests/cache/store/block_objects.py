"""Blocks, their objects, and a store around them, for tests of the format."""

from __future__ import annotations

import msgspec
import xxhash

from fdasync.cache.store.base import DONE, Item, Moves, Outcome
from fdasync.cache.store.block_format import BlockSchema, Section, make_header, object_key, write_header
from fdasync.cache.store.checked import CheckedStore
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion, page_aligned

ZEROS, TRASH = Part(0, 0, PAGE_NBYTES), Part(0, PAGE_NBYTES, PAGE_NBYTES)


SCHEMA = BlockSchema(
    layout="pages", kv_dtype="bfloat16", block_tokens=4, zeros=ZEROS, trash=TRASH,
    # with padding, without, and far below a page
    sections=(
        Section("kv", "bfloat16", (2, 5, 490), 9800),
        Section("routing", "uint8", (4, 1024), 4096),
        Section("values", "float16", (4, 1), 8),
    ),
)  # fmt: skip


NAMESPACE, KEY = bytes(range(16)), bytes(range(100, 116))


NAME = object_key(NAMESPACE, KEY, 2)


HEADER_AT, SECTIONS_AT = 2 * PAGE_NBYTES, 3 * PAGE_NBYTES


RAW_AT, REGION_NBYTES = 60 * PAGE_NBYTES, 70 * PAGE_NBYTES


STRIDE_NBYTES = 9 * PAGE_NBYTES


def values_of(schema: BlockSchema, salt: int) -> list[bytes]:
    return [
        bytes((salt + 7 * number + place) % 251 for place in range(section.nbytes))
        for number, section in enumerate(schema.sections)
    ]


def object_of(schema: BlockSchema, name: str, values: list[bytes]) -> bytes:
    """A whole object, put together the plain way."""
    sums = [xxhash.xxh3_64_intdigest(value) for value in values]
    padded = [value.ljust(page_aligned(len(value)), b"\0") for value in values]
    return b"".join([write_header(make_header(schema, name, sums)), *padded])


GOOD = object_of(SCHEMA, NAME, values_of(SCHEMA, 1))


class Beside(MemoryStore):
    """Lets the format write and check headers where the bytes move, as stores do that have threads for that."""

    moves: Moves

    def beside(self, moves):
        self.moves = moves
        return True

    async def put(self, items):
        outcomes = []
        for item in items:
            if not await self.exists_prefix([item.key]):
                self.moves.complete(item)
            outcomes += await super().put([item])
        return outcomes

    async def get_into(self, items):
        outcomes = []
        for item in items:
            [outcome] = await super().get_into([item])
            problem = self.moves.judge(item) if outcome is DONE else ""
            outcomes.append(Outcome("damaged", problem) if problem else outcome)
        return outcomes


class Bench:
    """A memory store behind the block format, a block of a region, and a way past the format."""

    def __init__(self, schema: BlockSchema = SCHEMA, inner: MemoryStore | None = None) -> None:
        self.inner = inner or MemoryStore(MemoryConfig())
        self.schema = schema
        self.store = CheckedStore(self.inner, schema)
        self.region = SharedRegion.create("bench", REGION_NBYTES)

    async def __aenter__(self) -> Bench:
        await self.store.open([self.region])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.aclose()
        self.region.close()

    def item(self, name: str = NAME, block: int = 0) -> Item:
        parts = [Part(0, HEADER_AT + block * STRIDE_NBYTES, PAGE_NBYTES)]
        at = SECTIONS_AT + block * STRIDE_NBYTES
        for section in self.schema.sections:
            parts.append(Part(0, at, section.nbytes))
            # no section of a block lies behind the other
            at += page_aligned(section.nbytes) + PAGE_NBYTES
        return Item(name, tuple(parts))

    def fill(self, values: list[bytes], block: int = 0) -> None:
        for part, value in zip(self.item(NAME, block).parts[1:], values, strict=True):
            self.region.view(part.offset, part.nbytes)[:] = value

    def filled(self, block: int = 0) -> list[bytes]:
        return [bytes(self.region.view(part.offset, part.nbytes)) for part in self.item(NAME, block).parts[1:]]

    async def plant(self, name: str, raw: bytes) -> None:
        """Put bytes under a key, whatever they are."""
        self.region.view(RAW_AT, len(raw))[:] = raw
        assert await MemoryStore.put(self.inner, [Item(name, (Part(0, RAW_AT, len(raw)),))]) == [DONE]

    async def dig(self, name: str, nbytes: int) -> bytes:
        """The bytes under a key."""
        assert await MemoryStore.get_into(self.inner, [Item(name, (Part(0, RAW_AT, nbytes),))]) == [DONE]
        return bytes(self.region.view(RAW_AT, nbytes))

    async def get(self, name: str = NAME) -> Outcome:
        [outcome] = await self.store.get_into([self.item(name)])
        return outcome


def changed(**fields: object) -> BlockSchema:
    return msgspec.structs.replace(SCHEMA, **fields)


KV, ROUTING, VALUES = SCHEMA.sections
