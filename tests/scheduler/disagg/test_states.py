"""Recurrent states that go with hand-overs, on the prefill side and on the decode side (docs/design.md, rule 45)."""

from __future__ import annotations

import pytest

from fdasync.events.actions import DropLease, HandOver, ReceiveBlocks
from tests.support.pd_table import PdTable, begin, of, only

PLACES = {"recurrent": True, "num_snapshots": 4, "num_host_snapshots": 4, "state_every_tokens": 1000}


def table_of(rules=None, **config) -> PdTable:
    return PdTable(rules, **{**PLACES, **config})


def states(table):
    return table.scheduler.index.pool.snapshots


def holds(table) -> int:
    return sum(one.holds for one in states(table).live())


# -- the prefill side


@pytest.mark.parametrize("length", [10, 12, 13])
def test_the_state_behind_the_prompt_goes_to_the_host_and_with_the_hand_over(length):
    table = table_of()
    turned = begin(table, 1, range(length))
    (take,) = [take for take in turned.step.snapshots if take.position == length]
    table.turn(table.done())
    (copy,) = [copy for copy in table.copies.values() if copy.snapshots]
    assert copy.snapshots == (take.place,)
    table.work()
    for offer in list(table.offers):
        table.turn(table.sent(offer))
    (hand,) = table.hands.values()
    assert hand.snapshot_host == copy.snapshots_host[0]
    assert holds(table) == 1
    table.turn(table.handed())
    assert table.finished[1].reason == "handed_over"
    assert holds(table) == 0
    assert table.is_empty()


def test_a_prompt_of_whole_blocks_leaves_its_state_to_others_too():
    table = table_of()
    turned = begin(table, 1, range(12))
    assert [take.position for take in turned.step.snapshots].count(12) == 1
    table.work()
    assert table.scheduler.index.get(table.keys(range(12))[2]).snapshot is not None


def test_a_sequence_that_is_handed_over_waits_for_a_place():
    table = table_of(num_snapshots=2, num_host_snapshots=2)
    begin(table, 1, range(10))
    table.turn(table.done())
    # both places are being copied to the host
    assert begin(table, 2, range(100, 110)).steps == []
    turned = table.turn(*[table.copied() for _ in list(table.copies)])
    assert turned.chunks == [(2, 10, True)]
    assert 10 in [take.position for take in turned.step.snapshots]
    table.work()
    # one place on the host is a peer's share
    assert [hand.group for hand in table.hands.values()] == [1]
    table.turn(table.handed(), *[table.sent(offer) for offer in list(table.offers)])
    table.work()
    assert [hand.group for hand in table.hands.values()] == [2]
    table.turn(table.handed())
    table.work()
    assert table.is_empty()


def test_the_last_token_of_a_prompt_in_chunks_waits_for_a_place():
    table = table_of(num_snapshots=2, num_host_snapshots=2, max_step_tokens=8)
    turned = begin(table, 1, range(14))
    assert turned.chunks == [(1, 8, False)]
    # both places are taken meanwhile
    pool = states(table)
    others = [pool.take(None, turned.step.step_id) for _ in range(2)]
    for other in others:
        other.hold()
    table.scheduler.check = lambda: None
    turned = table.turn(table.done())
    assert turned.chunks == [(1, 5, False)]
    assert table.turn(table.done()).steps == []
    for other in others:
        pool.unhold(other)
    turned = table.turn()
    assert turned.chunks == [(1, 1, True)]
    assert [take.position for take in turned.step.snapshots] == [14]
    del table.scheduler.check
    table.work()


@pytest.mark.parametrize("how", ["sample", "lease", "handed"])
def test_a_state_is_let_go_however_its_hand_over_ends(how):
    table = table_of()
    begin(table, 1, range(10))
    table.work()
    table.turn(*[table.sent(offer) for offer in list(table.offers)])
    table.work()
    assert [hand.snapshot_host >= 0 for hand in table.hands.values()] == [True]
    if how == "sample":
        # the decode instance may be reading: what is out stays until that has ended
        table.turn(table.abort(1))
        assert holds(table) == 1
        table.turn(*table.ends_of(1, 0))
    elif how == "lease":
        table.turn(*table.lost(1, 0))
    else:
        table.turn(table.handed())
    assert holds(table) == 0
    table.run()
    assert table.is_empty()


def test_a_decode_instance_gets_half_of_the_places():
    table = table_of(num_snapshots=12, num_host_snapshots=4, max_step_tokens=64)
    for key in range(4):
        begin(table, key, range(100 * key, 100 * key + 10))
    begin(table, 9, range(900, 910), decoders=("d1",))
    for _ in range(6):
        table.work()
        table.turn(*[table.sent(offer) for offer in list(table.offers)])
    assert sorted(hand.group for hand in table.hands.values()) == [0, 1, 9]
    while table.hands:
        table.turn(table.handed())
        table.work()
    assert len(table.finished) == 5
    assert table.is_empty()


# -- the decode side


def arrived_at() -> PdTable:
    """A lease whose two blocks are on the device; its first token is to come."""
    table = table_of()
    table.turn(table.lease(1, range(8)))
    table.turn(table.offered(1, 5, 0, 1))
    table.turn(table.received())
    table.turn(table.copied())
    return table


def test_a_sample_starts_when_its_state_is_on_the_device():
    table = arrived_at()
    turned = table.turn(table.first(1, 1, 6, 55, 0, with_state=True))
    receive = only(turned, ReceiveBlocks)
    assert (receive.offers, receive.indices, receive.host, len(receive.snapshots_host)) == ((6,), (3,), (), 1)
    turned = table.turn(table.received())
    (copy,) = turned.ins
    assert (copy.snapshots_host, copy.device) == (receive.snapshots_host, ())
    assert turned.steps == []
    turned = table.turn(table.copied())
    (start,) = turned.step.starts
    assert (start.num_cached, start.snapshot) == (8, copy.snapshots[0])
    table.run()
    assert table.finished[1].reason == "length"
    assert holds(table) == 0
    assert table.is_empty()


def test_a_state_that_did_not_arrive_ends_the_lease():
    table = arrived_at()
    table.turn(table.first(1, 1, 6, 55, 0, with_state=True))
    turned = table.turn(table.received(arrived="-"))
    assert "did not arrive" in only(turned, DropLease).reason
    assert holds(table) == 0
    assert table.is_empty()


def test_a_lease_that_ends_while_its_state_is_on_the_way_leaves_nothing():
    table = arrived_at()
    table.turn(table.first(1, 1, 6, 55, 0, with_state=True))
    table.turn(table.gives_up(1))
    assert holds(table) == 1
    table.turn(table.received())
    assert holds(table) == 0
    assert states(table).num_host_free == 4
    assert table.is_empty()


def test_as_many_states_are_copied_at_a_time_as_one_instance_may_have():
    table = table_of(num_host_snapshots=2)
    for group in (1, 2):
        table.turn(table.lease(group, range(100 * group, 100 * group + 4)))
        table.turn(table.offered(group, group, 0))
        table.turn(table.received())
        table.turn(table.copied())
    first = table.turn(table.first(1, 1, 11, 55, 0, with_state=True))
    second = table.turn(table.first(2, 2, 12, 56, 0, with_state=True))
    assert [len(of(turned, ReceiveBlocks)) for turned in (first, second)] == [1, 0]
    table.turn(table.received())
    turned = table.turn(table.copied())
    assert len(of(turned, ReceiveBlocks)) == 1
    table.turn(table.received())
    table.turn(*[table.copied() for _ in list(table.copies)])
    table.run()
    assert {key: end.reason for key, end in table.finished.items()} == {1: "length", 2: "length"}
    assert table.is_empty()


def group_at(**config) -> PdTable:
    """A lease of three samples whose two blocks are on the device; their first tokens are to come."""
    table = table_of(**config)
    table.turn(table.lease(1, range(8), n=3))
    table.turn(table.offered(1, 5, 0, 1))
    table.turn(table.received())
    table.turn(table.copied())
    return table


def fetched(*turns) -> list[int]:
    """The offers whose state is copied."""
    return [
        offer for turned in turns for one in of(turned, ReceiveBlocks) if one.snapshots_host for offer in one.offers
    ]


def test_one_state_serves_all_samples_of_a_group_that_wait():
    table = group_at()
    turns = [table.turn(table.first(1, 1 + at, 6 + at, 55 + at, with_state=True)) for at in range(2)]
    turned = table.turn(table.received())
    (copy,) = turned.ins
    assert holds(table) == 2
    # while it comes to the device
    turns.append(table.turn(table.first(1, 3, 8, 57, with_state=True)))
    assert fetched(*turns, turned) == [6]
    turned = table.turn(table.copied())
    assert [(start.key, start.num_cached, start.snapshot) for start in turned.step.starts] == [
        (key, 8, copy.snapshots[0]) for key in (1, 2, 3)
    ]
    table.run()
    assert {end.reason for end in table.finished.values()} == {"length"}
    assert holds(table) == 0
    assert table.is_empty()


def test_a_sample_that_comes_when_the_others_have_started_brings_its_own_state():
    table = group_at()
    turns = [table.turn(table.first(1, 1, 6, 55, with_state=True))]
    table.turn(table.received())
    table.turn(table.copied())
    turns.append(table.turn(table.first(1, 2, 7, 56, with_state=True)))
    assert fetched(*turns) == [6, 7]
    assert table.receives
    table.turn(table.received())
    table.turn(table.first(1, 3, 8, 57, with_state=True))
    table.run()
    assert len(table.finished) == 3
    assert table.is_empty()


@pytest.mark.parametrize("when", ["it waits for a place", "it is on its way", "it is here"])
def test_a_sample_that_ends_leaves_the_state_to_the_others(when):
    table = group_at()
    pool = states(table)
    table.scheduler.check = lambda: None
    taken = [pool.receive(None) for _ in range(4 if when == "it waits for a place" else 0)]
    turns = [table.turn(table.first(1, 1 + at, 6 + at, 55 + at, with_state=True)) for at in range(2)]
    assert fetched(*turns) == ([] if taken else [6])
    if when == "it is here":
        table.turn(table.received())
    turns = [table.turn(table.abort(1))]
    for one in taken:
        pool.unhold(one)
    del table.scheduler.check
    turns.append(table.turn())
    # of the one that is left
    assert fetched(*turns) == ([7] if taken else [])
    turns.append(table.turn(table.first(1, 3, 8, 57, with_state=True)))
    while table.receives or table.copies:
        turns.append(
            table.turn(*[table.received() for _ in list(table.receives)], *[table.copied() for _ in list(table.copies)])
        )
    table.run()
    assert [table.finished[key].reason for key in (2, 3)] == ["length"] * 2
    assert holds(table) == 0
    assert states(table).num_host_free == 4
    assert table.is_empty()


def test_a_lease_that_ends_gives_a_shared_state_back_once():
    table = group_at(num_host_snapshots=2)
    for at in range(3):
        table.turn(table.first(1, 1 + at, 6 + at, 55 + at, with_state=True))
    table.turn(table.received())
    assert holds(table) == 3
    table.turn(table.gives_up(1))
    table.turn(*[table.copied() for _ in list(table.copies)])
    assert holds(table) == 0
    # the instance's share of the places is whole
    table.turn(table.lease(11, range(100, 104)))
    table.turn(table.offered(11, 15, 0))
    table.turn(table.received())
    table.turn(table.copied())
    assert fetched(table.turn(table.first(11, 11, 16, 55, with_state=True))) == [16]
    table.turn(table.received())
    table.turn(*[table.copied() for _ in list(table.copies)])
    table.run()
    assert table.is_empty()


def test_a_model_without_recurrent_layers_sends_none():
    table = PdTable()
    begin(table, 1, range(10))
    table.work()
    table.turn(*[table.sent(offer) for offer in list(table.offers)])
    (hand,) = table.hands.values()
    assert isinstance(hand, HandOver)
    assert hand.snapshot_host == -1
