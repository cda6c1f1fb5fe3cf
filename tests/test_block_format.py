"""Objects of blocks: what is written, and that nothing damaged, mixed or foreign is ever believed."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest
import xxhash
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item, Outcome, finish
from fdasync.cache.store.block_format import (
    MAGIC,
    BlockHeader,
    BlockSchema,
    DamagedBlock,
    Section,
    SectionEntry,
    check_key,
    check_schema,
    check_value,
    make_header,
    object_key,
    parse_key,
    read_header,
    write_header,
)
from fdasync.cache.store.checked import Sealed
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import BadInput, PermanentError, StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion, page_aligned
from tests.helpers import case_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

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


def resealed(page: bytes) -> bytes:
    """The page with the checksum that it would have had, had somebody written it so."""
    return page[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8]))


def page_of(table: bytes, *, version: int = 1, object_nbytes: int = 5 * PAGE_NBYTES) -> bytes:
    return resealed(
        (struct.pack("<8sIIQ", MAGIC, version, len(table), object_nbytes) + table).ljust(PAGE_NBYTES, b"\0")
    )


GOOD = object_of(SCHEMA, NAME, values_of(SCHEMA, 1))


def is_padding(place: int) -> bool:
    return any(
        entry.offset + entry.nbytes <= place < page_aligned(entry.offset + entry.nbytes)
        for entry in read_header(GOOD[:PAGE_NBYTES]).sections
    )


class Beside(MemoryStore):
    """Lets the format seal and check where the bytes move, as stores do that have threads for that."""

    before_put: Callable[[Item], None]
    after_get: Callable[[Item], str]

    def beside(self, before_put, after_get):
        self.before_put, self.after_get = before_put, after_get
        return True

    async def put(self, items):
        outcomes = []
        for item in items:
            if not await self.exists_prefix([item.key]):
                self.before_put(item)
            outcomes += await super().put([item])
        return outcomes

    async def get_into(self, items):
        outcomes = []
        for item in items:
            [outcome] = await super().get_into([item])
            problem = self.after_get(item) if outcome is DONE else ""
            outcomes.append(Outcome("damaged", problem) if problem else outcome)
        return outcomes


BOTH = pytest.mark.parametrize("kind", [MemoryStore, Beside], ids=["on the loop", "beside"])


class Bench:
    """A sealed memory store, a block of a region, and a way past the seal."""

    def __init__(self, schema: BlockSchema = SCHEMA, inner: MemoryStore | None = None) -> None:
        self.inner = inner or MemoryStore(MemoryConfig())
        self.noted: list[tuple[str, str]] = []
        self.schema = schema
        self.store = Sealed(self.inner, schema, lambda key, reason: self.noted.append((key, reason)))
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


async def judged(
    raw: bytes, schema: BlockSchema = SCHEMA, name: str = NAME, kind: type[MemoryStore] = MemoryStore
) -> tuple[Outcome, list[bytes]]:
    """What a read of these bytes comes to; checks that damage is noted, deleted and can be mended."""
    async with Bench(schema, kind(MemoryConfig())) as bench:
        await bench.plant(name, raw)
        outcome = await bench.get(name)
        filled = bench.filled()
        if outcome.status == "damaged":
            assert bench.noted == [(name, outcome.problem.partition(":")[0])]
            assert await bench.store.exists_prefix([name]) == 0
            values = values_of(schema, 9)
            bench.fill(values)
            assert await bench.store.put([bench.item(name)]) == [DONE]
            assert await bench.get(name) == DONE
            assert bench.filled() == values
        else:
            assert bench.noted == []
        assert bench.store._damage == {}
        return outcome, filled


async def judged_alike(raw: bytes, schema: BlockSchema = SCHEMA, name: str = NAME) -> tuple[Outcome, list[bytes]]:
    """The same, wherever the bytes are hashed."""
    on_loop, beside = await judged(raw, schema, name), await judged(raw, schema, name, Beside)
    # what the parts hold after damage is undefined
    assert on_loop[0] == beside[0]
    assert on_loop == beside or on_loop[0].status == "damaged"
    return on_loop


# -- keys -------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 10**9 - 1))
@case_settings(100)
def test_keys_come_back(namespace, key, rank):
    name = object_key(namespace, key, rank)
    assert name == f"{namespace.hex()}/{key.hex()}.{rank}"
    assert parse_key(name) == (namespace, key, rank)


@given(st.text() | st.from_regex(r"[0-9a-f]{31,33}/[0-9a-fA-F]{31,33}\.[0-9]{0,11}", fullmatch=True))
@example(NAME.upper())
@example(NAME + "\n")
@example(NAME.replace(".2", ".02"))
@example(NAME.replace(".2", ".\u0662"))
@case_settings(200)
def test_other_keys_are_refused(text):
    parts = None
    with contextlib.suppress(BadInput):
        parts = parse_key(text)
    assert parts is None or object_key(*parts) == text


@pytest.mark.parametrize(
    ("namespace", "key", "rank"), [(b"", KEY, 0), (NAMESPACE, KEY + b"x", 0), (NAMESPACE, KEY, -1)]
)
def test_a_name_that_is_none_is_refused(namespace, key, rank):
    with pytest.raises(BadInput):
        object_key(namespace, key, rank)


# -- objects ----------------------------------------------------------------------------------------


@BOTH
async def test_an_object_lies_in_the_store_as_the_format_says(kind):
    async with Bench(inner=kind(MemoryConfig())) as bench:
        values = values_of(SCHEMA, 1)
        bench.fill(values)
        bench.region.view(TRASH.offset, TRASH.nbytes)[:] = b"t" * PAGE_NBYTES
        before = bytes(bench.region.view())
        assert await bench.store.put([bench.item()]) == [DONE]
        raw = await bench.dig(NAME, SCHEMA.object_nbytes)
        assert raw == GOOD
        # nothing but the lent header page (and what `dig` filled) was written
        after = bytes(bench.region.view())
        assert after[HEADER_AT:SECTIONS_AT] == GOOD[:PAGE_NBYTES]
        assert after[:HEADER_AT] + after[SECTIONS_AT:RAW_AT] == before[:HEADER_AT] + before[SECTIONS_AT:RAW_AT]
        header = read_header(raw[:PAGE_NBYTES], len(raw))
        assert (header.namespace, header.key, header.rank) == (NAMESPACE, KEY, 2)
        assert [(entry.name, entry.offset) for entry in header.sections] == [
            ("kv", 4096), ("routing", 16384), ("values", 20480),
        ]  # fmt: skip
        assert header.nbytes == len(raw) == SCHEMA.object_nbytes == 6 * PAGE_NBYTES
        check_value(header, raw)
        assert await bench.store.put([bench.item()]) == [EXISTS]


@BOTH
async def test_a_block_comes_back_to_its_parts_and_nowhere_else(kind):
    async with Bench(inner=kind(MemoryConfig())) as bench:
        await bench.plant(NAME, GOOD)
        bench.region.view()[:] = b"\xa5" * REGION_NBYTES
        assert await bench.get() == DONE
        assert bench.filled() == values_of(SCHEMA, 1)
        after = bytearray(bench.region.view())
        for part in [*bench.item().parts, TRASH]:
            after[part.offset : part.offset + part.nbytes] = b"\xa5" * part.nbytes
        assert after == b"\xa5" * REGION_NBYTES
        assert await bench.get(object_key(NAMESPACE, NAMESPACE)) == MISS


@BOTH
async def test_a_batch_has_an_outcome_for_each(kind):
    names = [object_key(NAMESPACE, bytes([number] * 16)) for number in range(5)]
    async with Bench(inner=kind(MemoryConfig())) as bench:
        for number in range(3):
            bench.fill(values_of(SCHEMA, number), number)
        items = [bench.item(name, number) for number, name in enumerate(names)]
        assert await bench.store.put(items[:3]) == [DONE] * 3
        await bench.plant(names[4], object_of(SCHEMA, names[0], values_of(SCHEMA, 3)))
        for number in range(5):
            bench.fill(values_of(SCHEMA, 99), number)
        outcomes = await bench.store.get_into([*items, bench.item(names[4], 5)])
        assert [outcome.status for outcome in outcomes] == ["done", "done", "done", "miss", "damaged", "damaged"]
        assert [bench.filled(number) for number in range(3)] == [values_of(SCHEMA, number) for number in range(3)]
        assert bench.noted == [(names[4], "key")] * 2
        assert await bench.store.exists_prefix(names) == 3
        assert await bench.store.delete(names) == 3
        assert (await bench.store.usage()).objects == 0


# -- damage -----------------------------------------------------------------------------------------


@given(st.integers(0, 8 * len(GOOD) - 1))
@example(0)
@example(8 * 8)
@example(8 * PAGE_NBYTES - 1)
@example(8 * len(GOOD) - 1)
@case_settings(250)
def test_a_flipped_bit_is_never_data(bit):
    raw = bytearray(GOOD)
    raw[bit // 8] ^= 1 << bit % 8
    outcome, filled = asyncio.run(judged_alike(bytes(raw)))
    if is_padding(bit // 8):
        # nobody's data: a read is right, and a full check tells
        assert (outcome, filled) == (DONE, values_of(SCHEMA, 1))
        with pytest.raises(DamagedBlock, match="padding"):
            check_value(read_header(raw[:PAGE_NBYTES]), raw)
    else:
        assert outcome.status == "damaged"
        with pytest.raises(DamagedBlock):
            check_value(read_header(raw[:PAGE_NBYTES], len(raw)), raw)


@given(st.integers(1, len(GOOD) - 1))
@example(PAGE_NBYTES)
@example(PAGE_NBYTES - 1)
@case_settings(60)
def test_a_truncated_object_is_never_data(nbytes):
    outcome, _ = asyncio.run(judged_alike(GOOD[:nbytes]))
    assert outcome.status == "damaged"
    # where the rest is zeros, as a torn write leaves it
    torn = GOOD[:nbytes].ljust(len(GOOD), b"\0")
    if torn != GOOD:
        outcome, _ = asyncio.run(judged_alike(torn))
        assert outcome.status == "damaged"
    with pytest.raises(DamagedBlock):
        check_value(read_header(GOOD[:nbytes][:PAGE_NBYTES], nbytes), GOOD[:nbytes])


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from(["values", "key"]))
@case_settings(60)
def test_a_mix_of_two_objects_is_never_data(takes, differs):
    other = object_of(SCHEMA, NAME, values_of(SCHEMA, 2))
    if differs == "key":
        other = object_of(SCHEMA, object_key(NAMESPACE, NAMESPACE, 2), values_of(SCHEMA, 2))
    pages = [(other if take else GOOD)[at * PAGE_NBYTES :][:PAGE_NBYTES] for at, take in enumerate(takes)]
    outcome, filled = asyncio.run(judged_alike(b"".join(pages)))
    if b"".join(pages) == GOOD:
        assert (outcome, filled) == (DONE, values_of(SCHEMA, 1))
    elif b"".join(pages) == other and differs == "values":
        assert (outcome, filled) == (DONE, values_of(SCHEMA, 2))
    else:
        assert outcome.status == "damaged"


def changed(**fields: object) -> BlockSchema:
    return msgspec.structs.replace(SCHEMA, **fields)


KV, ROUTING, VALUES = SCHEMA.sections


@pytest.mark.parametrize(
    ("reason", "schema"),
    [
        ("layout", changed(layout="pages2")),
        ("kv_dtype", changed(kv_dtype="float16")),
        ("block_tokens", changed(block_tokens=8)),
        ("sections", changed(sections=(KV, VALUES, ROUTING))),
        ("sections", changed(sections=(KV, Section("routing", "uint16", (4, 512), 4096), VALUES))),
        ("sections", changed(sections=(KV, Section("routing", "uint8", (4096,), 4096), VALUES))),
        ("sections", changed(sections=(KV, Section("routes", "uint8", (4, 1024), 4096), VALUES))),
        ("sections", changed(sections=(KV, ROUTING, Section("values", "float16", (4, 1), 9)))),
        ("store", changed(sections=(KV, ROUTING))),
    ],
)
async def test_an_object_of_another_schema_is_named(reason, schema):
    outcome, _ = await judged_alike(object_of(schema, NAME, values_of(schema, 1)))
    assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", reason)


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("namespace", object_key(KEY, KEY, 2)),
        ("key", object_key(NAMESPACE, NAMESPACE, 2)),
        ("rank", object_key(NAMESPACE, KEY, 1)),
    ],
)
async def test_an_object_under_another_key_is_named(reason, name):
    outcome, _ = await judged_alike(object_of(SCHEMA, name, values_of(SCHEMA, 1)))
    assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", reason)


@pytest.mark.parametrize(
    ("reason", "at", "change"),
    [
        ("magic", 0, b"fdablocK"),
        ("version", 8, struct.pack("<I", 2)),
        ("version", 8, struct.pack("<I", 0)),
        ("length", 12, struct.pack("<I", 1 << 31)),
        ("length", 16, struct.pack("<Q", 7 * PAGE_NBYTES)),
        ("length", 16, struct.pack("<Q", 1 << 63)),
        ("header", 24, b"\xff"),
        ("header", 12, struct.pack("<I", 17)),
        # what is behind the table is part of the header all the same: only its checksum knows
        ("header", 4000, b"x"),
    ],
)
async def test_what_is_wrong_with_a_header_is_named(reason, at, change):
    page = GOOD[:at] + change + GOOD[at + len(change) : PAGE_NBYTES]
    pages = [page] if at == 4000 else [page, resealed(page)]
    for page in pages:
        outcome, _ = await judged_alike(page + GOOD[PAGE_NBYTES:])
        assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", reason)


@given(st.binary(max_size=5000) | st.binary(min_size=PAGE_NBYTES, max_size=PAGE_NBYTES), st.booleans())
@case_settings(150)
def test_any_bytes_are_at_worst_damaged(raw, looks_right):
    if looks_right:
        raw = page_of(raw[:4000])
    with pytest.raises(DamagedBlock) as caught:
        read_header(raw)
    assert isinstance(caught.value, PermanentError)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 40000)
NAMES = st.text(max_size=9) | st.binary(max_size=17) | st.sampled_from(["kv", NAMESPACE])
ENTRIES = st.tuples(NAMES, NAMES, st.lists(NUMBERS, max_size=3), NUMBERS, NUMBERS, NUMBERS)
TABLES = st.tuples(NAMES, NAMES, NUMBERS, NAMES, NAMES, NUMBERS, st.lists(ENTRIES | NUMBERS, max_size=3))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.floats() | NUMBERS | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(TABLES | PLAIN, st.binary(max_size=3), NUMBERS.filter(lambda number: number >= 0))
@example((NAMESPACE, KEY, 0, "l", "d", 4, [("kv", "u", [1], 4096, 1, 0)]), b"", 8192)
@case_settings(300)
def test_any_table_under_a_right_checksum_is_a_header_or_damaged(table, behind, object_nbytes):
    page = page_of((msgspec.msgpack.encode(table) + behind)[:4000], object_nbytes=object_nbytes)
    try:
        header = read_header(page)
    except DamagedBlock:
        return
    assert header.nbytes == object_nbytes
    assert all(entry.offset % PAGE_NBYTES == 0 for entry in header.sections)
    for check in (lambda: check_schema(header, SCHEMA), lambda: check_value(header, page)):
        with pytest.raises(DamagedBlock):
            check()


def test_tables_that_would_point_elsewhere_are_damaged():
    def entry(**fields: object) -> SectionEntry:
        return msgspec.structs.replace(SectionEntry("kv", "u", (1,), 4096, 100, 0), **fields)

    def page(*sections: SectionEntry, object_nbytes: int) -> bytes:
        table = msgspec.msgpack.encode(BlockHeader(NAMESPACE, KEY, 0, "l", "d", 4, sections))
        return page_of(table, object_nbytes=object_nbytes)

    assert read_header(page(entry(), object_nbytes=8192)).nbytes == 8192
    assert read_header(page(object_nbytes=4096)).nbytes == 4096
    second = entry(name="b", offset=8192)
    assert read_header(page(entry(), second, object_nbytes=12288)).nbytes == 12288
    for sections, nbytes in [
        ((entry(offset=0),), 8192),
        ((entry(offset=8192),), 8192),
        ((entry(offset=4097),), 8192),
        ((entry(), entry(offset=4096)), 12288),
        ((second, entry()), 12288),
        ((entry(nbytes=4097),), 8192),
        ((entry(nbytes=1 << 62),), 8192),
        ((entry(nbytes=-1),), 8192),
        ((entry(), second), 8192),
        ((entry(),), 12288),
    ]:
        with pytest.raises(DamagedBlock):
            read_header(page(*sections, object_nbytes=nbytes))


@pytest.mark.parametrize("text", [b"\xa1\xff", b"\xa2\xc3\x28"])
def test_text_that_is_none_is_damaged(text):
    table = msgspec.msgpack.encode(BlockHeader(NAMESPACE, KEY, 0, "?", "d", 4, ()))
    assert table.count(b"\xa1?") == 1
    with pytest.raises(DamagedBlock, match="cannot be decoded"):
        read_header(page_of(table.replace(b"\xa1?", text), object_nbytes=4096))


@given(st.binary(max_size=3 * PAGE_NBYTES))
@case_settings(40)
def test_any_value_is_at_worst_damaged(value):
    assume(value != GOOD)
    with pytest.raises(DamagedBlock):
        check_value(read_header(GOOD[:PAGE_NBYTES]), value)


@pytest.mark.parametrize("value", [GOOD + b"\0", GOOD[:-1], GOOD[:-PAGE_NBYTES], b""])
def test_a_value_of_another_size_is_damaged(value):
    with pytest.raises(DamagedBlock, match="length"):
        check_value(read_header(GOOD[:PAGE_NBYTES]), value)


def test_a_table_that_does_not_fit_is_refused():
    header = make_header(changed(layout="x" * 4096), NAME, [0, 0, 0])
    with pytest.raises(BadInput) as caught:
        write_header(header)
    assert (caught.value.field, caught.value.limit) == ("sections", 4064)


def test_a_header_is_of_its_key():
    header = read_header(GOOD[:PAGE_NBYTES])
    check_key(header, NAME)
    for name, reason in [(object_key(KEY, KEY, 2), "namespace"), (object_key(NAMESPACE, KEY, 3), "rank")]:
        with pytest.raises(DamagedBlock) as caught:
            check_key(header, name)
        assert caught.value.reason == reason
    with pytest.raises(BadInput):
        check_key(header, "no/block.0")


# -- the store around it ----------------------------------------------------------------------------


class Odd(MemoryStore):
    """A store with a fault: `fault` names it."""

    fault = ""

    async def delete(self, keys):
        if self.fault == "delete":
            raise StoreUnavailable("odd", "not now")
        if self.fault == "defect":
            raise ZeroDivisionError
        return await super().delete(keys)

    async def get_into(self, items):
        outcomes = await super().get_into(items)
        if self.fault == "exists":
            return [EXISTS] * len(items)
        return outcomes[1:] if self.fault == "short" else outcomes

    async def put(self, items):
        outcomes = await super().put(items)
        return [*outcomes, DONE] if self.fault == "long" else outcomes


async def odd(fault: str, **limits: int) -> Bench:
    inner = Odd(MemoryConfig())
    inner.fault = fault
    inner.capabilities = msgspec.structs.replace(inner.capabilities, **limits)
    return Bench(inner=inner)


@pytest.mark.parametrize(("fault", "words"), [("delete", "store odd: not now"), ("defect", "could not be deleted")])
async def test_damage_that_cannot_be_deleted_says_so(fault, words):
    async with await odd(fault) as bench:
        await bench.plant(NAME, b"x" * SCHEMA.object_nbytes)
        for _ in range(2):
            outcome = await bench.get()
            assert outcome.status == "damaged"
            assert outcome.problem.startswith("magic: ")
            assert words in outcome.problem


async def test_a_store_that_answers_oddly_is_not_believed():
    async with await odd("exists") as bench:
        await bench.plant(NAME, GOOD)
        outcome = await bench.get()
        assert (outcome.status, outcome.ok, outcome.transient) == ("failed", False, False)
    for fault in ("short", "long"):
        async with await odd(fault) as bench:
            with pytest.raises(StoreUnavailable, match="outcomes for 1 items"):
                await (bench.store.get_into if fault == "short" else bench.store.put)([bench.item()])


async def test_items_that_are_no_blocks_are_refused_before_anything_happens():
    async with Bench() as bench:
        item = bench.item()
        header, kv, routing, values = item.parts
        wrong = [
            Item("no/block.0", item.parts),
            Item(NAME, (header, kv, routing)),
            Item(NAME, (header, kv, values, routing)),
            Item(NAME, (Part(0, HEADER_AT, 4095), kv, routing, values)),
            Item(NAME, (header, kv, routing, Part(0, REGION_NBYTES - 7, 8))),
            Item(NAME, (header, kv, routing, Part(0, -8, 8))),
            Item(NAME, (header, kv, routing, Part(1, 0, 8))),
        ]
        before = bytes(bench.region.view())
        for bad in wrong:
            for verb in (bench.store.put, bench.store.get_into):
                with pytest.raises(StoreRejected):
                    await verb([item, bad])
        assert bytes(bench.region.view()) == before
        assert await bench.store.exists_prefix([NAME]) == 0


@pytest.mark.parametrize(
    "schema",
    [
        changed(sections=()),
        changed(sections=(ROUTING, KV)),
        changed(sections=(KV, ROUTING, ROUTING)),
        changed(sections=(KV, Section("routing", "uint8", (0,), 0))),
        changed(sections=(KV, Section("routing", "uint8", (-1,), 8))),
        changed(sections=(KV, *(Section(f"aux{number}", "uint8", (1,), 1) for number in range(150)))),
        changed(layout="x" * 4096),
        changed(layout="\ud800"),
        changed(block_tokens=-1),
        changed(zeros=Part(0, 0, 100)),
        changed(trash=Part(0, 0, 100)),
    ],
)
def test_a_schema_that_cannot_be_stored_is_refused(schema):
    with pytest.raises(StoreRejected):
        Sealed(MemoryStore(MemoryConfig()), schema)


@pytest.mark.parametrize("limits", [{"max_parts": 5}, {"max_item_nbytes": 6 * PAGE_NBYTES - 1}, {"max_key_chars": 66}])
async def test_a_store_that_cannot_take_blocks_is_refused(limits):
    bench = await odd("", **limits)
    with pytest.raises(StoreRejected):
        await bench.store.open([bench.region])
    await bench.store.aclose()
    bench.region.close()


async def test_limits_are_those_of_blocks():
    async with await odd("", max_parts=6, max_item_nbytes=6 * PAGE_NBYTES, max_key_chars=67) as bench:
        item = bench.item()
        assert bench.store.capabilities.max_parts == len(item.parts)
        assert bench.store.capabilities.max_item_nbytes == item.nbytes
        assert await bench.store.put([item]) == [DONE]


SMALL = changed(sections=(Section("kv", "uint8", (50,), 50),))
NAMES_OF_MANY = [object_key(NAMESPACE, bytes([number] * 16)) for number in range(60)]


class Slow(MemoryStore):
    """Waits in each verb, for `gate` if there is one, and counts; `fail` names a key that raises."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig())
        self.calls = self.running = self.stopped = 0
        self.fail = ""
        self.gate: asyncio.Event | None = None
        self.on_call: Callable[[], None] = lambda: None

    async def _slowly(self, items: Sequence[Item]) -> None:
        self.calls += 1
        self.running += 1
        self.on_call()
        try:
            if self.fail in [item.key for item in items]:
                await asyncio.sleep(0)
                raise StoreUnavailable("slow", "not this one")
            # ends late when it is cancelled, as the contract allows
            await finish(asyncio.ensure_future(self.gate.wait() if self.gate else asyncio.sleep(0.01)))
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self.running -= 1

    async def get_into(self, items):
        await self._slowly(items)
        return await super().get_into(items)

    async def put(self, items):
        await self._slowly(items)
        return await super().put(items)


@contextlib.asynccontextmanager
async def many() -> AsyncIterator[tuple[Slow, Sealed, SharedRegion, list[Item]]]:
    """A slow store, sealed, and 60 small blocks."""
    region = SharedRegion.create("many", 122 * PAGE_NBYTES)
    inner = Slow()
    store = Sealed(inner, SMALL)
    items = []
    for number, name in enumerate(NAMES_OF_MANY):
        at = (2 + 2 * number) * PAGE_NBYTES
        items.append(Item(name, (Part(0, at, PAGE_NBYTES), Part(0, at + PAGE_NBYTES, 50))))
        region.view(at + PAGE_NBYTES, 50)[:] = bytes([number]) * 50
    await store.open([region])
    yield inner, store, region, items
    await store.aclose()
    region.close()


async def test_large_batches_overlap_and_keep_their_order():
    async with many() as (inner, store, region, items):
        headers: list[int] = []
        inner.on_call = lambda: headers.append(sum(region.view()[item.parts[0].offset] != 0 for item in items))
        assert await store.put(items) == [DONE] * 60
        # the first blocks were on their way before the last were hashed
        assert len(headers) == 4
        assert headers[0] <= 18
        assert await store.put(items[1::2]) == [EXISTS] * 30
        assert await inner.delete([NAMES_OF_MANY[5], NAMES_OF_MANY[40]]) == 2
        region.view(50 * PAGE_NBYTES, 50)[:] = b"x" * 50
        raw = Item(NAMES_OF_MANY[40], (Part(0, 50 * PAGE_NBYTES, 50),))
        assert await inner.put([raw]) == [DONE]
        for item in items:
            region.view(item.parts[1].offset, 50)[:] = b"-" * 50
        outcomes = await store.get_into(items)
        wanted = ["done"] * 60
        wanted[5], wanted[40] = "miss", "damaged"
        assert [outcome.status for outcome in outcomes] == wanted
        for number, item in enumerate(items):
            if wanted[number] == "done":
                assert bytes(region.view(item.parts[1].offset, 50)) == bytes([number]) * 50
        assert (await store.usage()).objects == 58


@pytest.mark.parametrize("verb", ["put", "get_into"])
async def test_a_large_batch_ends_as_one(verb):
    async with many() as (inner, store, _, items):
        inner.fail = NAMES_OF_MANY[20]
        with pytest.raises(StoreUnavailable, match="store slow: not this one"):
            await getattr(store, verb)(items)
        assert (inner.running, inner.calls > 1) == (0, True)


@pytest.mark.parametrize("verb", ["put", "get_into"])
@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("fail", ["", NAMES_OF_MANY[59]])
async def test_a_large_batch_that_is_cancelled_has_ended_when_it_says_so(verb, calls, fail):
    async with many() as (inner, store, _, items):
        task = asyncio.ensure_future(getattr(store, verb)(items))
        started = asyncio.Event()
        inner.on_call = lambda: started.set() if inner.calls == calls else None
        inner.fail = fail
        # none ends before all have begun, however slow this machine is
        inner.gate = asyncio.Event()
        await started.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert inner.running > 0
        task.cancel()
        inner.gate.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert inner.running == 0
        assert inner.stopped >= min(calls, 3)


async def test_closing_closes_the_store_inside():
    async with Bench() as bench:
        assert await bench.store.kill("why") is True
        await bench.store.aclose()
        # its memory may be gone from now on
        bench.region.close()
        for verb in (bench.store.put, bench.store.get_into, bench.inner.put):
            with pytest.raises(StoreUnavailable):
                await verb([bench.item()])
        await bench.store.aclose()


async def test_the_loop_goes_on_while_much_is_hashed():
    """One callback hashes a block, or 4 MiB of a section."""
    nbytes = (16 << 20) + 100
    schema = changed(sections=(Section("kv", "uint8", (nbytes,), nbytes),))
    region = SharedRegion.create("big", 3 * PAGE_NBYTES + nbytes)
    store = Sealed(MemoryStore(MemoryConfig()), schema)
    await store.open([region])
    region.view(3 * PAGE_NBYTES, nbytes)[:] = bytes(range(256)) * (nbytes // 256) + bytes(100)
    item = Item(NAME, (Part(0, HEADER_AT, PAGE_NBYTES), Part(0, 3 * PAGE_NBYTES, nbytes)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.ensure_future(count())
    for verb in (store.put, store.get_into):
        turns = 0
        assert await verb([item]) == [DONE]
        assert turns >= nbytes // (4 << 20)
    counter.cancel()
    await asyncio.wait([counter])
    # slices give what the whole gives
    checksum = xxhash.xxh3_64_intdigest(region.view(3 * PAGE_NBYTES, nbytes))
    assert read_header(region.view(HEADER_AT, PAGE_NBYTES)).sections[0].checksum == checksum
    await store.aclose()
    region.close()
