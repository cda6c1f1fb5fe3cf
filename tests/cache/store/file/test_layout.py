"""What a file store's folder looks like: what is encoded is decoded, and nothing else is believed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdasync.cache.store.file import layout as file_layout
from fdasync.cache.store.file.index import Drop, Entry, FileIndex, Grow, Place, Segment
from fdasync.cache.store.file.layout import (
    CLEAN,
    EMPTY_RECORD,
    LayoutError,
    Order,
    Record,
    Shape,
    decode_head,
    decode_order,
    decode_record,
    encode_head,
    encode_order,
    encode_record,
    least_nbytes,
    parse_name,
    slots_within,
)
from fdasync.ipc.shared_memory import PAGE_NBYTES
from tests.support.helpers import case_settings

SHAPES = st.builds(
    lambda pages, slots, number: Shape(pages * PAGE_NBYTES, slots, number),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.integers(1, 10**9),
)
KEYS = st.text("0123456789abcdefghijklmnopqrstuvwxyz./_-", min_size=1, max_size=200)
BIG = st.integers(0, 2**64 - 1)


@st.composite
def records(draw):
    shape = draw(SHAPES)
    record = Record(draw(KEYS), draw(st.integers(1, shape.stride)), draw(BIG), draw(BIG))
    return shape, draw(st.integers(0, shape.slots - 1)), record


@case_settings(200)
@given(records())
def test_a_record_is_what_was_written(written):
    shape, slot, record = written
    data = encode_record(record, shape, slot)
    assert len(data) == len(EMPTY_RECORD)
    assert decode_record(data, shape, slot) == record
    assert decode_record(EMPTY_RECORD, shape, slot) is None


@pytest.mark.ci
@case_settings(300)
@given(records(), st.integers(0, 8 * 512 - 1), SHAPES, st.integers(0, 10**6))
def test_a_record_is_believed_nowhere_else_and_not_with_one_bit_changed(written, bit, other, other_slot):
    shape, slot, record = written
    data = bytearray(encode_record(record, shape, slot))
    if (other.number, other_slot) != (shape.number, slot):
        with pytest.raises(LayoutError):
            decode_record(bytes(data), other, other_slot)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LayoutError):
        decode_record(bytes(data), shape, slot)
    with pytest.raises(LayoutError):
        decode_record(bytes(data[: bit // 8]), shape, slot)


@case_settings(300)
@given(SHAPES, st.binary(min_size=16, max_size=16), st.integers(0, 8 * 56 - 1), SHAPES)
def test_a_head_is_what_was_written_and_fits_its_name(shape, boot, bit, other):
    page = bytearray(encode_head(shape, boot))
    assert len(page) == PAGE_NBYTES
    assert decode_head(bytes(page), shape) == boot
    if other != shape:
        with pytest.raises(LayoutError):
            decode_head(bytes(page), other)
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LayoutError):
        decode_head(bytes(page), shape)


@case_settings(300)
@given(st.binary(max_size=600), SHAPES)
@example(b"", Shape(4096, 1, 1))
@example(bytes(512), Shape(4096, 1, 1))
def test_any_bytes_are_refused_by_one_error(data, shape):
    for decode in (decode_order, lambda data: decode_head(data, shape)):
        with pytest.raises(LayoutError):
            decode(data)
    if data != EMPTY_RECORD:
        with pytest.raises(LayoutError):
            decode_record(data, shape, 0)


@case_settings(200)
@given(st.binary(max_size=400))
def test_whatever_has_the_right_checksum_is_refused_by_the_same_error(body):
    # a bug's bytes, or a joker's: the checksum is right, and inside is nonsense
    shape = Shape(4096, 3, 1)
    record = (file_layout._RECORD_MAGIC + b"\1\0" + body)[:504].ljust(504, b"\0")
    with contextlib.suppress(LayoutError):
        assert decode_record(record + file_layout._checksum(record), shape, 0) is not None
    order = file_layout._ORDER_MAGIC + body
    with contextlib.suppress(LayoutError):
        assert isinstance(decode_order(order + file_layout._checksum(order)), Order)


@case_settings(200)
@given(BIG, st.lists(BIG, max_size=50), st.integers(0, 10**6))
def test_the_order_is_what_was_written(next_sequence, sequences, bit):
    order = Order(next_sequence, sequences)
    data = bytearray(encode_order(order))
    assert decode_order(bytes(data)) == order
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LayoutError):
        decode_order(bytes(data))


@pytest.mark.ci
@case_settings(300)
@given(SHAPES, st.text(max_size=40))
def test_names(shape, text):
    assert parse_name(shape.name) == shape
    found = parse_name(text)
    assert found is None or found.name == text


@pytest.mark.parametrize("name", ["", "lock", "4096-1-1.seg", "4097-1-00000001.seg", "4096-0-00000001.seg",
                                  "04096-1-00000001.seg", "4096-1-000000001.seg", "4096-1-00000001.seg.new",
                                  "4096-1-00000001.seg\n", "\u0664096-1-00000001.seg"])  # fmt: skip
def test_what_is_no_name(name):
    assert parse_name(name) is None


@case_settings(300)
@given(st.integers(1, 1000), st.integers(0, 1 << 32))
def test_as_many_slots_as_fit(pages, nbytes):
    stride = pages * PAGE_NBYTES
    slots = slots_within(stride, nbytes)
    assert slots == 0 or Shape(stride, slots, 1).nbytes <= nbytes
    assert Shape(stride, slots + 1, 1).nbytes > nbytes
    assert (slots > 0) == (least_nbytes(stride) <= nbytes)
    shape = Shape(stride, slots + 1, 1)
    # records, table and slots do not overlap, and slots are whole pages
    assert shape.record_at(slots) + 512 <= shape.table_nbytes == shape.value_at(0)
    assert shape.value_at(slots) + stride == shape.nbytes
    assert shape.value_at(0) % PAGE_NBYTES == 0


class IndexPlay:
    """A `FileIndex` and what a store does with it, without files."""

    def __init__(self, cap):
        self.index = FileIndex(cap, 40_000)
        self.number = 0
        self.sequence = 0

    def put(self, key, stride):
        while True:
            step = self.index.find(stride)
            if isinstance(step, Grow):
                self.number += 1
                segment = Segment(Shape(stride, step.slots, self.number), -1, CLEAN)
                segment.free = list(range(step.slots))
                self.index.add_segment(segment)
            elif isinstance(step, Drop):
                self.index.remove_segment(step.segment)
            elif isinstance(step, Place):
                self.sequence += 1
                self.index.add(Entry(key, step.segment, step.slot, stride, self.sequence, 0))
                return True
            else:
                return False
            assert self.index.total_nbytes <= self.index.max_nbytes


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "delete", "pin", "unpin"]), st.integers(0, 12)), max_size=80
)


@case_settings(200)
@given(STEPS)
def test_the_counts_agree_and_the_least_recently_used_object_goes_first(steps):
    play = IndexPlay(cap=200_000)
    index = play.index
    pinned = []
    for what, number in steps:
        key = f"k{number}"
        stride = (4096, 12288, 40960)[number % 3]
        entry = index.get(key)
        if what == "put" and entry is None:
            before = index.entries()
            mine = [one for one in before if one.segment.shape.stride == stride and not one.ref_count]
            put = play.put(key, stride)
            gone = [one for one in before if one.gone]
            evicted = [one for one in gone if one.segment.shape.stride == stride]
            # of its own size the one that was used longest ago, of another size what was used longer ago still
            assert evicted in ([], mine[:1])
            assert not mine or all(one.used < mine[0].used for one in gone if one not in evicted)
            assert put or not mine, "it found no room where something could have gone"
        elif what == "get" and entry is not None:
            index.touch(entry)
        elif what == "delete" and entry is not None:
            index.pin(entry)
            index.forget(entry)
            if index.unpin(entry):
                index.release(entry.segment, entry.slot, stale=False)
        elif what == "pin" and entry is not None:
            index.pin(entry)
            pinned.append(entry)
        elif what == "unpin" and pinned:
            one = pinned.pop(number % len(pinned))
            if index.unpin(one):
                index.release(one.segment, one.slot, stale=False)
        # whoever is pinned keeps slot and segment
        for one in pinned:
            assert one.segment in list(index.segments())
            assert one.segment.entries[one.slot] is one
        index.check()


def test_a_size_that_nobody_uses_any_more_gives_its_room_away():
    play = IndexPlay(cap=200_000)
    index = play.index
    for number in range(4):
        assert play.put(f"large{number}", 40960)
    small = [f"small{number}" for number in range(20)]
    for key in small:
        assert play.put(key, 4096)
    assert all(index.get(key) for key in small), "they made room for each other, and old ones of another size stayed"
    assert index.get("large0") is None


def test_a_size_in_use_keeps_its_room():
    play = IndexPlay(cap=3 * Shape(40960, 1, 1).nbytes + Shape(4096, 7, 1).nbytes)
    index = play.index
    for number in range(3):
        assert play.put(f"large{number}", 40960)
    for number in range(60):
        assert play.put(f"small{number}", 4096)
        for other in range(3):
            index.touch(index.get(f"large{other}"))
        # the segment of the small ones is the hottest, what goes next from it is not
        index.touch(index.get(f"small{number}"))
    assert all(index.get(f"large{other}") for other in range(3))
    assert [entry.key for entry in index.entries() if entry.nbytes == 4096] == [f"small{n}" for n in range(53, 60)]
