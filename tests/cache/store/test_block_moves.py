"""Blocks on their way to a store and back: pieces, and the header pages that are made of a kept one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdasync.cache.store import block_moves
from fdasync.cache.store.base import Item
from fdasync.cache.store.block_format import Section, object_key
from fdasync.cache.store.checked import CheckedStore, _whole
from fdasync.cache.store.memory import MemoryConfig
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from tests.cache.store.block_objects import SCHEMA, Beside, object_of
from tests.support.helpers import case_settings


def schema_of(sizes, layout="pages", dtype="uint8", state_nbytes=0):
    sections = [Section(f"part {number}", dtype, (size,), size) for number, size in enumerate(sizes)]
    return msgspec.structs.replace(
        SCHEMA,
        layout=layout,
        kv_dtype=dtype,
        sections=(msgspec.structs.replace(sections[0], name="kv"), *sections[1:]),
        state=Section("state", "uint8", (state_nbytes,), state_nbytes) if state_nbytes else None,
    )


class Way:
    """The moves of a schema, over a region where a block lies. `state_nbytes`: the last of its sections is a state; a
    plain block of the schema has none."""

    def __init__(self, sizes, region, state_nbytes=0):
        self.schema = schema_of(sizes, state_nbytes=state_nbytes)
        sizes = [*sizes, state_nbytes] if state_nbytes else sizes
        self.region = region
        inner = Beside(MemoryConfig())
        self.checked = CheckedStore(inner, self.schema)
        self.checked._regions = [region]
        self.moves = inner.moves
        self.values = [bytes([7 + number]) * size for number, size in enumerate(sizes)]
        self.object = object_of(self.schema, object_key(b"n" * 16, b"k" * 16), self.values)
        at, parts = 2 * PAGE_NBYTES, [Part(0, 2 * PAGE_NBYTES, PAGE_NBYTES)]
        for size in sizes:
            at += -(-parts[-1].nbytes // PAGE_NBYTES) * PAGE_NBYTES
            parts.append(Part(0, at, size))
        self.item = Item(object_key(b"n" * 16, b"k" * 16), tuple(parts))

    def whole(self, padding):
        return _whole(self.item, getattr(self.checked._forms[len(self.item.parts)], padding))

    def fill(self):
        for part, value in zip(self.item.parts[1:], self.values, strict=True):
            self.region.view(part.offset, part.nbytes)[:] = value

    def arrive(self, data, count=None):
        """Bring an object in; of the pieces only so many. The arrival, and the pieces' offsets and sizes."""
        arrival = self.moves.arrive(self.whole("trash"))
        seen = []
        for offset, views in arrival:
            if count is not None and len(seen) == count:
                break
            size = sum(view.nbytes for view in views)
            seen.append((offset, size))
            for view in views:
                view[:] = data[offset : offset + view.nbytes]
                offset += view.nbytes
        return arrival, seen


@pytest.fixture(scope="module")
def region():
    region = SharedRegion.create("moves", 64 * PAGE_NBYTES)
    yield region
    region.close()


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(block_moves, "PIECE_NBYTES", 3 * PAGE_NBYTES + 100)


SIZES = st.lists(st.integers(1, 40_000) | st.sampled_from([4096, 8192, 12388, 12387, 8292]), min_size=1, max_size=4)

STATE = st.sampled_from([0, 0, 1, 8192, 12387])


@pytest.mark.usefixtures("small_pieces")
class TestPieces:
    @given(sizes=SIZES, state_nbytes=STATE)
    @example(sizes=[1], state_nbytes=0)
    @example(sizes=[8292], state_nbytes=0)
    @example(sizes=[8292], state_nbytes=12387)
    @case_settings(100)
    def test_a_block_comes_as_it_left_and_each_byte_once(self, sizes, state_nbytes, region):
        way = Way(sizes, region, state_nbytes)
        way.fill()
        left = bytearray(len(way.object))
        for offset, views in way.moves.leave(way.whole("zeros")):
            left[offset : offset + sum(view.nbytes for view in views)] = b"".join(views)
        assert bytes(left) == way.object
        for part in way.item.parts:
            region.view(part.offset, part.nbytes)[:] = bytes(part.nbytes)
        arrival, seen = way.arrive(way.object)
        assert arrival.problem == ""
        offset = 0
        for at, size in seen:
            assert at == offset
            assert 0 < size <= block_moves.PIECE_NBYTES * 9 // 8
            offset += size
        assert offset == len(way.object)
        for part, value in zip(way.item.parts[1:], way.values, strict=True):
            assert bytes(region.view(part.offset, part.nbytes)) == value

    @given(sizes=SIZES, state_nbytes=STATE, data=st.data())
    @case_settings(150)
    def test_a_flipped_bit_of_header_or_data_is_told(self, sizes, state_nbytes, data, region):
        way = Way(sizes, region, state_nbytes)
        sizes = [*sizes, state_nbytes] if state_nbytes else sizes
        places, offset = [(0, PAGE_NBYTES)], PAGE_NBYTES
        for size in sizes:
            places.append((offset, size))
            offset += -(-size // PAGE_NBYTES) * PAGE_NBYTES
        number = data.draw(st.integers(0, len(sizes)))
        start, nbytes = places[number]
        byte = start + data.draw(st.sampled_from([0, nbytes - 1]) | st.integers(0, nbytes - 1))
        damaged = bytearray(way.object)
        damaged[byte] ^= 1 << data.draw(st.integers(0, 7))
        arrival, _ = way.arrive(damaged)
        assert arrival.problem
        assert ("checksum" in arrival.problem) or number == 0

    def test_a_block_that_stopped_on_its_way_was_not_judged(self, region):
        way = Way([40_000, 8], region)
        judged = []
        way.moves.problem = lambda _, sums: judged.append(sums) or "judged"
        arrival, seen = way.arrive(way.object, count=2)
        assert (len(seen), judged, arrival.problem) == (2, [], "")
        arrival, _ = way.arrive(way.object)
        assert (len(judged), arrival.problem) == (1, "judged")
