"""Objects that are written together, in neighbouring slots: killed, torn, failed and stopped anywhere in between."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.store.base import Item, PlainMoves
from fdasync.cache.store.file.io import make_segment
from fdasync.cache.store.file.layout import CLEAN, Record, Shape
from fdasync.cache.store.file.recovery import scan_segment
from fdasync.cache.store.file.writes import WriteSlot, Written, runs_of, write_slots
from tests.support.helpers import case_settings

NBYTES = 9000
SHAPE = Shape(12288, 24, 3)


class Killed(BaseException):
    """The process ended in the midst of a write."""


def content(generation, slot):
    return f"{generation} {slot} ".encode().ljust(NBYTES, bytes([65 + slot]))


class Disk:
    """A segment on disk, with an old object in some slots, and writes that can be cut off."""

    def __init__(self, folder, old=()):
        for path in folder.iterdir():
            path.unlink()
        self.fd = make_segment(folder, SHAPE, CLEAN, synced=False)
        self.old = sorted(old)
        self.write(self.slots("old", self.old))

    def slots(self, generation, numbers):
        moves = PlainMoves(lambda item: [memoryview(content(generation, int(item.key.partition("-")[2])))])
        return [
            WriteSlot(
                self.fd,
                SHAPE,
                slot,
                slot in self.old and generation == "new",
                Record(f"{generation}-{slot}", NBYTES, slot, 1),
                Item(f"{generation}-{slot}", ()),
                moves,
            )
            for slot in numbers
        ]

    def write(self, slots, stopped=lambda: False, *, synced=False):
        return write_slots(slots, stopped, synced=synced)

    def found(self):
        """What a start believes, by slot; each believed object has all of its bytes."""
        scan = scan_segment(self.fd, SHAPE, CLEAN)
        assert scan.problem == ""
        for slot, record in scan.records.items():
            generation, _, number = record.key.partition("-")
            assert int(number) == slot
            assert os.pread(self.fd, NBYTES, SHAPE.value_at(slot)) == content(generation, slot)
        return {slot: record.key.partition("-")[0] for slot, record in scan.records.items()}

    def close(self):
        os.close(self.fd)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "segment"
    folder.mkdir()
    return folder


SLOTS = st.sets(st.integers(0, SHAPE.slots - 1), min_size=1, max_size=8).map(sorted)


@given(st.sets(st.integers(0, 30), max_size=20).map(sorted), st.integers(1, 5))
@case_settings(100)
def test_runs_are_neighbours_and_hold_every_slot_once(numbers, most):
    def slot(fd, number):
        return WriteSlot(fd, SHAPE, number, False, Record("k", 1, 1, 1), Item("k", ()), PlainMoves(lambda _: []))

    slots = [slot(fd, number) for fd in (5, 6) for number in numbers]
    runs = runs_of(slots, most)
    assert [one for run in runs for one in run] == slots
    for run in runs:
        assert 1 <= len(run) <= most
        assert [(one.fd, one.slot) for one in run] == [(run[0].fd, run[0].slot + n) for n in range(len(run))]
    joins = [(a[-1], b[0]) for a, b in itertools.pairwise(runs)]
    assert all(len(runs[n]) == most or (a.fd, a.slot + 1) != (b.fd, b.slot) for n, (a, b) in enumerate(joins))


@pytest.mark.parametrize("synced", [False, True])
@given(new=SLOTS, old=st.sets(st.integers(0, SHAPE.slots - 1), max_size=10), data=st.data())
@case_settings(60)
def test_wherever_it_is_killed_every_object_is_there_whole_or_not_at_all(synced, new, old, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    true_pwritev, calls = os.pwritev, []
    # the calls of one write that is not cut off
    last = data.draw(st.integers(1, 2 * len(new) + len(set(new) & old) + 1), label="killed in call")
    share = data.draw(st.floats(0, 1), label="share of it on disk")
    disk = Disk(folder, old)

    def torn(fd, views, offset, *flags):
        calls.append(offset)
        if len(calls) < last:
            return true_pwritev(fd, views, offset, *flags)
        joined = b"".join(views)
        os.pwrite(fd, joined[: int(len(joined) * share)], offset)
        raise Killed

    killed = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", torn)
        try:
            disk.write(disk.slots("new", new), synced=synced)
        except Killed:
            killed = True
    found = disk.found()
    disk.close()
    if not killed:
        assert {slot: found.get(slot) for slot in new} == dict.fromkeys(new, "new")
    for slot in range(SHAPE.slots):
        if slot not in new:
            assert found.get(slot) == ("old" if slot in old else None)


@pytest.mark.parametrize("synced", [False, True])
@given(
    new=SLOTS, bad=st.sets(st.integers(0, SHAPE.slots - 1), max_size=3), code=st.sampled_from([errno.EIO, errno.ENOSPC])
)
@case_settings(60)
def test_a_bad_place_in_the_table_fails_its_own_object_only(synced, new, bad, code, tmp_path_factory):
    disk = Disk(tmp_path_factory.mktemp("bad"), new[::2])
    true_pwritev = os.pwritev
    places = [(SHAPE.record_at(slot), SHAPE.record_at(slot + 1)) for slot in bad]

    def failing(fd, views, offset, *flags):
        stop = offset + sum(len(view) for view in views)
        if any(offset < end and begin < stop for begin, end in places):
            raise OSError(code, os.strerror(code))
        return true_pwritev(fd, views, offset, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        results = disk.write(disk.slots("new", new), synced=synced)
    found = disk.found()
    disk.close()
    for slot, written in zip(new, results, strict=True):
        if slot not in bad:
            assert (written, found[slot]) == (Written(), "new")
            continue
        assert written.trouble is not None
        assert written.trouble.code == code
        # the old object is told to be there exactly if it is; what may have a record is told to be stale
        assert written.stale
        assert written.kept == (slot in disk.old) == (found.get(slot) == "old")


def test_a_run_that_is_stopped_in_the_midst_ends_what_it_began(folder):
    disk = Disk(folder, [4, 5, 6, 7])
    slots, looks = disk.slots("new", [4, 5, 6, 7]), []

    def stopped():
        looks.append(None)
        # once before the run, then before each object
        return len(looks) > 3

    results = disk.write(slots, stopped)
    assert results == [Written(), Written(), *[Written(stale=True, kept=True, skipped=True)] * 2]
    assert disk.found() == {4: "new", 5: "new", 6: "old", 7: "old"}
    disk.close()


def test_a_run_that_is_stopped_before_it_begins_changes_nothing(folder):
    disk = Disk(folder, [4, 5])
    results = disk.write(disk.slots("new", [4, 5, 6]), lambda: True)
    assert results == [Written(stale=slot < 6, kept=True, skipped=True) for slot in (4, 5, 6)]
    assert disk.found() == {4: "old", 5: "old"}
    disk.close()


def test_neighbours_share_a_call_for_their_records(folder, monkeypatch):
    disk = Disk(folder, [4, 5, 6, 7])
    true_pwritev, tables = os.pwritev, []

    def noted(fd, views, offset, *flags):
        if offset < SHAPE.table_nbytes:
            tables.append((offset, sum(len(view) for view in views)))
        return true_pwritev(fd, views, offset, *flags)

    monkeypatch.setattr(os, "pwritev", noted)
    disk.write(disk.slots("new", [4, 5, 6, 7, 9]))
    cleared = [(SHAPE.record_at(slot), 512) for slot in (4, 5, 6, 7)]
    assert tables == [*cleared, (SHAPE.record_at(4), 4 * 512), (SHAPE.record_at(9), 512)]
    assert disk.found() == dict.fromkeys([4, 5, 6, 7, 9], "new")
    disk.close()
