"""Objects of blocks that are damaged, mixed or foreign: none is ever believed."""

from __future__ import annotations

import asyncio
import struct

import msgspec
import pytest
import xxhash
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, Outcome
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
    read_header,
    write_header,
)
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import BadInput, PermanentError
from fdasync.ipc.shared_memory import PAGE_NBYTES, page_aligned
from tests.cache.store.block_objects import (
    GOOD,
    KEY,
    KV,
    NAME,
    NAMESPACE,
    ROUTING,
    SCHEMA,
    VALUES,
    Bench,
    Beside,
    changed,
    object_of,
    values_of,
)
from tests.support.helpers import case_settings


def with_checksum(page: bytes) -> bytes:
    """The page with the checksum that it would have had, had somebody written it so."""
    return page[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8]))


def page_of(table: bytes, *, version: int = 1, object_nbytes: int = 5 * PAGE_NBYTES) -> bytes:
    return with_checksum(
        (struct.pack("<8sIIQ", MAGIC, version, len(table), object_nbytes) + table).ljust(PAGE_NBYTES, b"\0")
    )


def is_padding(place: int) -> bool:
    return any(
        entry.offset + entry.nbytes <= place < page_aligned(entry.offset + entry.nbytes)
        for entry in read_header(GOOD[:PAGE_NBYTES]).sections
    )


async def judged(
    raw: bytes, schema: BlockSchema = SCHEMA, name: str = NAME, kind: type[MemoryStore] = MemoryStore
) -> tuple[Outcome, list[bytes]]:
    """What a read of these bytes comes to; checks that damage is deleted and can be mended."""
    async with Bench(schema, kind(MemoryConfig())) as bench:
        await bench.plant(name, raw)
        outcome = await bench.get(name)
        filled = bench.filled()
        if outcome.status == "damaged":
            assert await bench.store.exists_prefix([name]) == 0
            values = values_of(schema, 9)
            bench.fill(values)
            assert await bench.store.put([bench.item(name)]) == [DONE]
            assert await bench.get(name) == DONE
            assert bench.filled() == values
        return outcome, filled


async def judged_alike(raw: bytes, schema: BlockSchema = SCHEMA, name: str = NAME) -> tuple[Outcome, list[bytes]]:
    """The same, wherever the bytes are hashed."""
    on_loop, beside = await judged(raw, schema, name), await judged(raw, schema, name, Beside)
    # what the parts hold after damage is undefined
    assert on_loop[0] == beside[0]
    assert on_loop == beside or on_loop[0].status == "damaged"
    return on_loop


# -- damage -----------------------------------------------------------------------------------------


@pytest.mark.ci
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


@pytest.mark.ci
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
    pages = [page] if at == 4000 else [page, with_checksum(page)]
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


@pytest.mark.ci
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
