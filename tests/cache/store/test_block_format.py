"""Objects of blocks: what is written, and that nothing damaged, mixed or foreign is ever believed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdasync.cache.store.base import DONE, EXISTS, MISS
from fdasync.cache.store.block_format import check_value, object_key, parse_key, read_header
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import BadInput
from fdasync.ipc.shared_memory import PAGE_NBYTES
from tests.cache.store.block_objects import (
    GOOD,
    HEADER_AT,
    KEY,
    NAME,
    NAMESPACE,
    RAW_AT,
    REGION_NBYTES,
    SCHEMA,
    SECTIONS_AT,
    TRASH,
    Bench,
    Beside,
    object_of,
    values_of,
)
from tests.support.helpers import case_settings

BOTH = pytest.mark.parametrize("kind", [MemoryStore, Beside], ids=["on the loop", "beside"])


# -- keys -------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 10**9 - 1))
@case_settings(100)
def test_keys_come_back(namespace, key, rank):
    name = object_key(namespace, key, rank)
    assert name == f"{namespace.hex()}/{key.hex()}.{rank}"
    assert parse_key(name) == (namespace, key, rank)


@pytest.mark.ci
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
        assert [outcome.problem.partition(":")[0] for outcome in outcomes[4:]] == ["key"] * 2
        assert [bench.filled(number) for number in range(3)] == [values_of(SCHEMA, number) for number in range(3)]
        assert await bench.store.exists_prefix(names) == 3
        assert await bench.store.delete(names) == 3
        assert (await bench.store.usage()).objects == 0
