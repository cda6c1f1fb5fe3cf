"""Places of snapshots: who has them, who goes first, and that none is given away while something uses it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fdasync.cache.blocks import Block
from fdasync.cache.snapshots import SnapshotPool, StateSpec, snapshot_nbytes
from fdasync.errors import BadInput, InvariantBroken


def a_block() -> Block:
    return Block(0, -1, None)


def taken(pool: SnapshotPool, step: int):
    snapshot = pool.take(a_block(), step)
    assert snapshot is not None
    return snapshot


def one_demoted_beside_a_copy():
    """A pool of two places, a snapshot that is on the host, too, and one that a sequence passed."""
    pool = SnapshotPool(2, 1)
    kept, passed = taken(pool, 0), taken(pool, 0)
    pool.step_done(0)
    assert pool.add_host(kept)
    kept.on_host = True
    pool.demote(passed)
    return pool, kept, passed


def test_what_is_held_stays_until_it_is_on_the_host():
    pool = SnapshotPool(1, 1)
    held = taken(pool, 0)
    held.hold()
    pool.step_done(0)
    assert not pool.has_room()
    assert pool.take(a_block(), 1) is None
    assert pool.add_host(held)
    held.on_host = True
    assert pool.has_room()
    assert not pool.has_room(2)
    other = taken(pool, 1)
    # its place on the host stays, too, and what has no block goes with its last hold
    assert not pool.add_host(other)
    pool.drop(held)
    assert held in pool.live()
    pool.unhold(held)
    assert held not in pool.live()
    pool.check()


def test_a_snapshot_has_each_spec_at_an_aligned_place():
    specs = (StateSpec("convolution", (3, 5), "bfloat16", (0, 1)), StateSpec("recurrent", (64,), "float32", (0,)))
    assert [spec.nbytes for spec in specs] == [256, 256]
    assert snapshot_nbytes(specs) == 512
    assert snapshot_nbytes(()) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""}, {"layers": ()}, {"shape": ()}, {"shape": (4, 0)}, {"dtype": "int8"},
    ],
)  # fmt: skip
def test_a_spec_that_says_nothing_is_refused(fields):
    with pytest.raises(BadInput, match="state_specs"):
        StateSpec(**{"name": "a", "shape": (4,), "dtype": "float32", "layers": (0,), **fields})


def test_a_place_that_a_step_names_is_given_to_nobody():
    pool = SnapshotPool(1)
    first = taken(pool, 0)
    assert pool.take(a_block(), 0) is None
    assert pool.refused == 1
    pool.drop(first)
    assert pool.num_free == 0, "step 0 still writes it"
    pool.step_done(0)
    assert pool.num_free == 1
    pool.check()


def test_a_sequence_starts_from_what_an_earlier_step_takes():
    pool = SnapshotPool(2)
    snapshot = taken(pool, 3)
    assert not snapshot.can_start(3)
    assert snapshot.can_start(4)
    pool.pin(snapshot)
    assert pool.started(snapshot, 4) == snapshot.place
    pool.step_done(3)
    assert snapshot.step < 0
    # step 4 reads it
    pool.drop(snapshot)
    assert pool.num_free == 1
    pool.step_done(4)
    assert pool.num_free == 2


def test_the_one_used_longest_ago_goes_and_those_with_a_copy_on_the_host_go_first():
    pool = SnapshotPool(3, 1)
    old, middle, young = (taken(pool, step) for step in range(3))
    for step in range(3):
        pool.step_done(step)
    assert pool.add_host(young)
    young.on_host = True
    taken(pool, 3)
    assert (young.place, young.on_host) == (-1, True)
    taken(pool, 4)
    assert old.block is None
    assert middle.place >= 0
    assert pool.lost == 1


def test_one_that_was_demoted_goes_before_all_others():
    pool = SnapshotPool(3)
    old, middle, young = (taken(pool, step) for step in range(3))
    for step in range(3):
        pool.step_done(step)
    pool.demote(young)
    taken(pool, 3)
    assert young.block is None
    assert old.place >= 0
    # one that is gone already, and one that somebody starts from meanwhile
    pool.demote(young)
    pool.demote(middle)
    pool.pin(middle)
    taken(pool, 4)
    assert old.block is None
    assert middle.place >= 0


def test_one_that_was_demoted_is_lost_before_one_with_a_copy_goes_and_is_not_copied_itself():
    pool = SnapshotPool(3, 2)
    kept, passed, young = (taken(pool, step) for step in range(3))
    for step in range(3):
        pool.step_done(step)
    assert pool.add_host(kept)
    kept.on_host = True
    assert pool.has_clean(1)
    assert not pool.has_clean(2)
    pool.demote(passed)
    assert pool.has_clean(2)
    assert not pool.has_clean(3)
    pool.await_in(passed, 4)
    # a step in flight names it: others go out in time
    assert not pool.has_clean(2)
    pool.step_done(4)
    assert pool.has_clean(2)
    assert pool.next_dirty(3) == [young]
    taken(pool, 3)
    assert (passed.place, passed.block, pool.lost) == (-1, None, 1)
    assert kept.place >= 0


def test_one_that_was_demoted_and_used_since_is_as_any_other():
    pool, kept, passed = one_demoted_beside_a_copy()
    pool.pin(passed)
    pool.unpin(passed)
    assert pool.next_dirty(2) == [passed]
    taken(pool, 1)
    assert (kept.place, passed.place >= 0, pool.lost) == (-1, True, 0)


def test_one_that_was_demoted_is_kept_while_a_store_waits_for_it():
    pool, kept, passed = one_demoted_beside_a_copy()
    passed.block.wanted = passed.block.with_state = True
    assert pool.next_dirty(2) == [passed]
    taken(pool, 1)
    assert (kept.place, passed.place >= 0, pool.unwritten) == (-1, True, 0)


def test_host_copies_of_what_is_on_the_device_go_last():
    pool = SnapshotPool(2, 1)
    first, second = taken(pool, 0), taken(pool, 0)
    pool.step_done(0)
    assert pool.add_host(first)
    first.on_host = True
    assert not pool.has_host_room
    # what shall be kept may take it all the same; nothing is lost
    assert pool.add_host(second)
    assert (first.host, first.place >= 0, pool.lost) == (-1, True, 0)


def test_the_host_has_room_while_what_is_there_alone_is_not_in_use():
    pool = SnapshotPool(1, 1)
    first = taken(pool, 0)
    pool.step_done(0)
    assert pool.add_host(first)
    first.on_host = True
    taken(pool, 1)
    assert first.place == -1
    assert pool.has_host_room
    pool.pin(first)
    assert not pool.has_host_room


def test_a_block_has_one_snapshot():
    pool = SnapshotPool(2)
    snapshot = taken(pool, 0)
    with pytest.raises(InvariantBroken, match="already"):
        pool.take(snapshot.block, 1)


def test_the_device_is_cleared_of_what_is_not_on_the_host():
    pool = SnapshotPool(2, 2)
    kept, lost = taken(pool, 0), taken(pool, 0)
    with pytest.raises(InvariantBroken, match="in use"):
        pool.clear_device()
    pool.step_done(0)
    assert pool.add_host(kept)
    kept.on_host = True
    pool.clear_device()
    assert (kept.place, kept.on_device, kept.block is not None) == (-1, False, True)
    assert lost.block is None
    assert pool.num_free == 2
    pool.check()


class Places(RuleBasedStateMachine):
    """Steps, starts, copies and drops in any order: a place never has a second user."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SnapshotPool(3, 2)
        self.step = 0
        self.done = -1
        self.flying: list[tuple[int, list[int]]] = []
        self.out: list = []
        self.ready: list = []

    def _some(self, data, wanted):
        found = [one for one in self.pool.live() if wanted(one)]
        return data.draw(st.sampled_from(found)) if found else None

    def can_be_lost(self, one) -> bool:
        """A sequence passed it, and nothing uses it."""
        return one.passed and one.place >= 0 and not (one.pins or one.moves) and one.busy <= self.done

    @rule(data=st.data(), takes=st.integers(0, 2), starts=st.integers(0, 1))
    def plan(self, data, takes, starts):
        named = []
        for _ in range(starts):
            one = self._some(data, lambda one: one.block is not None and one.on_device and one.can_start(self.step))
            if one is not None:
                self.pool.pin(one)
                named.append(self.pool.started(one, self.step))
        for _ in range(takes):
            spare = [] if self.pool.num_free else [one for one in self.pool.live() if self.can_be_lost(one)]
            one = self.pool.take(a_block(), self.step)
            if spare:
                # one of them went, whatever else has a copy
                assert [one.place for one in spare].count(-1) == 1
            if one is not None:
                assert one.place not in named
                # earlier steps end first; copies do not
                assert one.place not in [copy.place for copy, _ in self.out]
                named.append(one.place)
        self.flying.append((self.step, named))
        self.step += 1

    @rule(data=st.data())
    def demote(self, data):
        one = self._some(data, lambda _: True)
        if one is not None:
            self.pool.demote(one)

    @precondition(lambda self: self.flying)
    @rule()
    def end_step(self):
        self.done, _ = self.flying.pop(0)
        self.pool.step_done(self.done)

    @rule(data=st.data())
    def drop(self, data):
        one = self._some(data, lambda one: one.block is not None)
        if one is not None:
            self.pool.drop(one)

    @rule(data=st.data())
    def copy_out(self, data):
        one = self._some(data, lambda one: one.on_device and one.host < 0 and one.step < 0 and not one.moves)
        if one is not None and self.pool.add_host(one):
            one.moves += 1
            self.out.append((one, True))

    @rule(data=st.data())
    def copy_in(self, data):
        one = self._some(data, lambda one: one.block is not None and one.place < 0 and not one.moves)
        if one is not None and self.pool.bring(one):
            flying = [place for _, named in self.flying for place in named]
            assert one.place not in flying, "a step in flight names it"
            self.pool.pin(one)
            one.moves += 1
            self.out.append((one, False))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end_copy(self, data):
        one, outward = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        one.moves -= 1
        if outward:
            one.on_host = True
        else:
            one.on_device = True
            one.pins -= 1
        self.pool.moved(one)

    @invariant()
    def agrees(self):
        self.pool.check()
        assert not any(one.passed for one in self.pool.next_dirty(5))


Places.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestPlaces = Places.TestCase
