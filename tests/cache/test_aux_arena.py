"""The bytes of aux slots in shared memory: `aux_arena.py`."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.aux import AuxSpec
from fdasync.cache.aux_arena import AuxArena, arena_nbytes
from fdasync.errors import InvariantBroken
from fdasync.testing.harness.leaks import no_leaks
from tests.support.helpers import SPECS, case_settings


@pytest.fixture
def arena():
    arena = AuxArena.create(4, 8, SPECS)
    yield arena
    arena.close()


def blank(count, specs=SPECS, fill=0xAB):
    return {
        spec.name: np.frombuffer(bytes([fill]) * (count * spec.token_nbytes), spec.dtype)
        .reshape(count, *spec.shape)
        .copy()
        for spec in specs
    }


def write(arena, slot, generation, offset, count, seed=0):
    rng = np.random.default_rng(seed)
    values = {
        "routing": rng.integers(0, 255, (count, 3, 2), np.uint8),
        # every bit pattern, not-a-numbers included
        "values": rng.integers(0, 1 << 16, (count, 4), np.uint16).view(np.float16),
    }
    index = slot * arena.block_tokens + offset + np.arange(count)
    arena.scatter(index, np.full(count, generation, np.uint32), values)
    return values


def same_bits(got, want):
    return all(got[name].tobytes() == want[name].tobytes() for name in want)


def test_rows_of_both_specs_come_back_bit_for_bit(arena):
    want = write(arena, 2, 5, 3, 4)
    got = blank(6)
    arena.copy_rows((2,), (5,), 3, 4, got, 1)
    assert same_bits({name: rows[1:5] for name, rows in got.items()}, want)
    untouched = blank(6)
    for name, rows in got.items():
        assert rows[0].tobytes() == untouched[name][0].tobytes()
        assert rows[5].tobytes() == untouched[name][5].tobytes()


@pytest.mark.parametrize(
    ("slot", "generation", "offset", "count"),
    [
        (1, 7, 0, 8),  # one row short
        (1, 7, 7, 1),  # never written
        (1, 6, 0, 1),  # an earlier use of the slot
        (1, 8, 0, 1),  # a later use
        (1, 0, 7, 1),  # generation 0 is what fresh memory holds
        (0, 7, 0, 1),  # another slot
    ],
)
def test_rows_of_another_use_or_never_written_are_refused_and_nothing_is_copied(arena, slot, generation, offset, count):
    write(arena, 1, 7, 0, 7)
    got = blank(8)
    with pytest.raises(InvariantBroken, match="were not written for generation"):
        arena.copy_rows((slot,), (generation,), offset, count, got, 0)
    assert same_bits(got, blank(8))


def test_a_slots_next_use_hides_the_rows_of_the_last_one(arena):
    write(arena, 0, 1, 0, 8)
    write(arena, 0, 2, 0, 3, seed=1)
    with pytest.raises(InvariantBroken):
        arena.copy_rows((0,), (1,), 0, 1, blank(1), 0)
    with pytest.raises(InvariantBroken):
        arena.copy_rows((0,), (2,), 3, 1, blank(1), 0)
    arena.copy_rows((0,), (2,), 0, 3, blank(3), 0)


def test_copies_are_copies(arena):
    want = write(arena, 0, 1, 0, 8)
    got = blank(8)
    arena.copy_rows((0,), (1,), 0, 8, got, 0)
    write(arena, 0, 2, 0, 8, seed=9)
    assert same_bits(got, want)


def test_the_other_side_sees_the_same_rows_through_the_fd(arena):
    peer = AuxArena.attach(arena.plan, iter([os.dup(arena.region.fd)]))
    want = write(peer, 3, 9, 0, 8)
    got = blank(8)
    arena.copy_rows((3,), (9,), 0, 8, got, 0)
    assert same_bits(got, want)
    peer.close()
    arena.copy_rows((3,), (9,), 0, 8, got, 0)


@pytest.mark.parametrize("change", [-1, 1])
def test_the_shared_file_can_neither_shrink_nor_grow(arena, change):
    size = os.fstat(arena.region.fd).st_size
    with pytest.raises(PermissionError):
        os.ftruncate(arena.region.fd, size + change * mmap.PAGESIZE)


def test_the_seals_cannot_be_changed(arena):
    import fcntl

    seals = fcntl.fcntl(arena.region.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_file_that_is_too_small_is_refused():
    with no_leaks(), pytest.raises(InvariantBroken, match="are needed"):
        AuxArena.attach((4, 8, SPECS, None), iter([os.memfd_create("small")]))


def test_close_gives_the_fd_back_and_may_be_called_again():
    arena = AuxArena.create(1, 4, SPECS)
    fd = arena.region.fd
    write(arena, 0, 1, 0, 4)
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_creating_without_room_leaves_no_fd_behind():
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"File too large|Cannot allocate memory|No space"):
        AuxArena.create(1 << 54, 8, ())
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_size_is_known_before_anything_is_allocated():
    assert arena_nbytes(4, 8, ()) == 4096
    assert arena_nbytes(4, 8, SPECS) == 3 * 4096
    one = AuxSpec("routing", (48, 8), "uint8")
    assert arena_nbytes(1024, 16, (one,)) == 1024 * 16 * 4 + 1024 * 16 * 384


@case_settings(40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 8), st.booleans()), max_size=12))
def test_what_may_be_read_is_what_was_last_written_for_that_generation(writes):
    arena = AuxArena.create(4, 8, SPECS)
    generations = [1, 1, 1, 1]
    model: dict[tuple[int, int], tuple[int, bytes]] = {}
    for number, (slot, offset, count, new_use) in enumerate(writes):
        count = min(count, 8 - offset)
        generations[slot] += new_use
        values = write(arena, slot, generations[slot], offset, count, seed=number)
        for row in range(count):
            model[slot, offset + row] = (generations[slot], values["values"][row].tobytes())
    for slot in range(4):
        for offset in range(8):
            got = blank(1)
            generation, want = model.get((slot, offset), (0, b""))
            if generation == generations[slot]:
                arena.copy_rows((slot,), (generation,), offset, 1, got, 0)
                assert got["values"].tobytes() == want
            else:
                with pytest.raises(InvariantBroken):
                    arena.copy_rows((slot,), (generations[slot],), offset, 1, got, 0)
    arena.close()


# -- a row is written whole ----------------------------------------------------------------------------


def values_of(count, **other):
    values = {"routing": np.ones((count, 3, 2), np.uint8), "values": np.ones((count, 4), np.float16), **other}
    return {name: rows for name, rows in values.items() if rows is not None}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"values": None}, r"without \['values'\] and with \[\]"),
        ({"routing": None, "rooting": np.ones((3, 3, 2), np.uint8)}, r"without \['routing'\] and with \['rooting'\]"),
        ({"more": np.ones(3)}, r"without \[\] and with \['more'\]"),
        ({"routing": np.ones((3, 3, 2), np.int8)}, r"'routing' are int8 \[3, 3, 2\].* uint8 \[3, 3, 2\]"),
        ({"routing": np.ones((3, 3, 2), np.uint16)}, "'routing' are uint16"),
        ({"values": np.ones((3, 4), np.float32)}, "'values' are float32"),
        ({"values": np.ones((3, 4), np.dtype(">f2"))}, "'values' are >f2"),
        # all of these would be broadcast
        ({"values": np.ones((3, 1), np.float16)}, r"'values' are float16 \[3, 1\].* float16 \[3, 4\] for 3 tokens"),
        ({"values": np.ones(4, np.float16)}, r"\[4\]"),
        ({"values": np.ones((1, 4), np.float16)}, r"\[1, 4\]"),
        ({"routing": np.ones((3, 3), np.uint8)}, r"\[3, 3\]"),
    ],
)
def test_rows_that_are_not_exactly_the_specs_are_refused_and_nothing_is_written(arena, change, told):
    before = write(arena, 0, 1, 0, 8)
    with pytest.raises(InvariantBroken, match=told):
        arena.scatter(np.arange(3), np.full(3, 2, np.uint32), values_of(3, **change))
    got = blank(8)
    arena.copy_rows((0,), (1,), 0, 8, got, 0)
    assert same_bits(got, before)


def test_a_slots_next_use_never_shows_the_last_ones_bytes_of_a_spec_that_was_left_out(arena):
    write(arena, 0, 1, 0, 8)
    with pytest.raises(InvariantBroken):
        arena.scatter(np.arange(8), np.full(8, 2, np.uint32), {"routing": np.ones((8, 3, 2), np.uint8)})
    with pytest.raises(InvariantBroken, match="not written for generation 2"):
        arena.copy_rows((0,), (2,), 0, 8, blank(8), 0)


@pytest.mark.parametrize("index", [[-1, 0, 1], [30, 31, 32]])
def test_rows_outside_of_the_arena_are_refused(arena, index):
    with pytest.raises(InvariantBroken, match=r"aux rows .* of 32"):
        arena.scatter(np.array(index), np.full(3, 1, np.uint32), values_of(3))


@pytest.mark.parametrize(
    ("index", "generations"),
    [
        (np.arange(3), np.array([1, 1, 2**32 + 1])),
        (np.arange(3), np.array([-1, 1, 1])),
        (np.arange(3), np.array([0, 1, 1])),
        (np.arange(3), np.array([1.0, 1.7, 1.0])),
        (np.array([True, True, False]), np.ones(3, np.uint32)),
    ],
)
def test_what_is_no_place_or_no_use_of_a_slot_is_refused(arena, index, generations):
    with pytest.raises(InvariantBroken, match="aux rows"):
        arena.scatter(index, generations, values_of(3))
    assert arena.written_nbytes == 0


@pytest.mark.parametrize(
    ("slot", "offset", "count"), [(9, 0, 4), (4, 0, 1), (-1, 0, 8), (0, -1, 2), (0, 4, 5), (0, 0, -1)]
)
def test_nothing_was_written_outside_of_a_slot(arena, slot, offset, count):
    write(arena, 0, 1, 0, 8)
    with pytest.raises(InvariantBroken, match="of slot"):
        arena.check_written(slot, 1, offset, count)


def test_no_rows_of_a_slot_are_written(arena):
    write(arena, 0, 1, 0, 4)
    for offset in (0, 3, 8):
        arena.check_written(0, 1, offset, 0)


def test_each_row_has_a_generation_of_its_own(arena):
    with pytest.raises(InvariantBroken, match="generations"):
        arena.scatter(np.arange(3), np.ones(1, np.uint32), values_of(3))


def test_a_step_without_tokens_writes_no_rows(arena):
    arena.scatter(np.arange(0), np.ones(0, np.uint32), values_of(0))
    assert arena.written_nbytes == 0


def test_copies_may_be_of_some_specs(arena):
    want = write(arena, 2, 5, 0, 4)
    got = {"values": blank(4)["values"]}
    arena.copy_rows((2,), (5,), 0, 4, got, 0)
    assert same_bits(got, {"values": want["values"]})


# -- rows of several slots -----------------------------------------------------------------------------


@case_settings(60)
@given(
    st.permutations(range(4)),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.integers(0, 7),
    st.integers(1, 32),
    st.none() | st.integers(0, 31),
)
def test_rows_of_several_slots_come_in_the_order_asked_for_or_not_at_all(slots, generations, offset, count, missing):
    arena = AuxArena.create(4, 8, SPECS)
    count = min(count, 32 - offset)
    named = slots[: -(-(offset + count) // 8)]
    uses = generations[: len(named)]
    values = [write(arena, slot, use, 0, 8, seed=slot) for slot, use in zip(named, uses, strict=True)]
    if missing is not None and missing < 8 * len(named):
        # the next use of its slot wrote this row
        write(arena, named[missing // 8], uses[missing // 8] + 1, missing % 8, 1)
    got = blank(count + 1)
    if missing is not None and offset <= missing < offset + count:
        with pytest.raises(InvariantBroken, match=rf"of slot {named[missing // 8]} were not written"):
            arena.copy_rows(named, uses, offset, count, got, 1)
        assert same_bits(got, blank(count + 1))
    else:
        arena.copy_rows(named, uses, offset, count, got, 1)
        for name in got:
            want = np.concatenate([rows[name] for rows in values])[offset : offset + count]
            assert got[name][1:].tobytes() == want.tobytes()
    arena.close()


@pytest.mark.parametrize(
    ("slots", "generations", "offset", "count"),
    [
        ((0, 1), (1,), 0, 9),
        ((0, 1), (1, 1), 0, 17),
        ((0, 1), (1, 1), 8, 1),
        # a slot behind the last row
        ((0, 1), (1, 1), 0, 8),
        ((0, 1), (1, 1), 3, 2),
        ((0, 1), (1, 1), -1, 9),
        ((), (), 0, 1),
        ((0,), (1,), 0, 0),
        ((0, 4), (1, 1), 0, 16),
        ((0, -1), (1, 1), 0, 16),
        ((0, 1), (1, 1 << 32), 0, 16),
        ((0, 1), (1, 0), 0, 16),
    ],
)
def test_rows_that_cannot_be_in_the_slots_named_are_refused(arena, slots, generations, offset, count):
    write(arena, 0, 1, 0, 8)
    write(arena, 1, 1, 0, 8)
    with pytest.raises(InvariantBroken, match="aux rows"):
        arena.copy_rows(slots, generations, offset, count, blank(32), 0)
