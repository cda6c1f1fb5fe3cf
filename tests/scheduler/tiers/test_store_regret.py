"""The scheduler with a store behind the host: what waiting for it may cost a request (docs/design.md, section 7)."""

from __future__ import annotations

import pytest

from tests.scheduler.tiers.scenes import LOOKUP_S, fetch_id, leave_on_host, make_table

A = range(13)  # three full blocks that a hit may cover


# -- bounded regret


def test_the_deadlines_are_the_estimate_and_a_tenth_of_the_recompute_time():
    table = make_table(A)
    (lookup,) = table.turn(table.request(1, A, 2)).lookups
    # twelve tokens take 1.2 s
    assert lookup.deadline == pytest.approx(1.0 + LOOKUP_S + 0.12)
    table.now = 1.5
    # no slower than believed: all of the regret is left for the fetch
    (fetch,) = table.turn(table.looked_up(seconds=LOOKUP_S)).fetches
    assert fetch.deadline == pytest.approx(1.5 + 0.003 + 0.12)


def test_what_a_lookup_took_too_long_is_taken_off_the_time_for_the_fetch():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    (fetch,) = table.turn(table.looked_up(seconds=LOOKUP_S + 0.05)).fetches
    assert fetch.deadline == pytest.approx(1.0 + 0.003 + 0.07)


def test_what_was_answered_behind_its_deadline_says_that_the_loop_was_held_up_and_nothing_of_the_store():
    table = make_table(A)
    rates = table.scheduler.store_planner.rates
    lookup_s, fetch_s = rates.lookup_s, rates.fetch_s(1000)
    table.turn(table.request(1, A, 2))
    table.now = 7.0
    # nor is it taken off what the request may wait for the fetch
    (fetch,) = table.turn(table.looked_up(seconds=6.0)).fetches
    assert fetch.deadline == pytest.approx(7.0 + 0.003 + 0.12)
    table.now = 13.0
    table.turn(table.fetched(seconds=6.0))
    assert (rates.lookup_s, rates.fetch_s(1000)) == (lookup_s, fetch_s)
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 12)


def test_a_fetch_that_is_late_is_as_slow_as_its_deadline_however_long_the_loop_was_held_up():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    (fetch,) = table.turn(table.looked_up(seconds=LOOKUP_S)).fetches
    table.now = fetch.deadline + 6.0
    table.turn(table.fetched(arrived="---", late=True, seconds=6.0 + 0.123))
    assert table.scheduler.store_planner.rates.fetch_s(3000) == pytest.approx(0.123)


def test_a_fetch_behind_others_is_given_their_time_too():
    table = make_table(A, range(100, 113))
    table.turn(table.request(1, A, 2), table.request(2, range(100, 113), 2))
    turned = table.turn(table.looked_up(seconds=LOOKUP_S), table.looked_up(seconds=LOOKUP_S))
    assert [fetch.deadline for fetch in turned.fetches] == [
        pytest.approx(1.0 + 0.003 + 0.12), pytest.approx(1.0 + 0.006 + 0.12)
    ]  # fmt: skip


def test_the_regret_of_one_request_is_spent_once():
    # half of it is lost over the first lookup; the second, for the rest, has the other half
    table = make_table(range(25))
    table.turn(table.request(1, range(25), 1))
    table.turn(table.looked_up(count=3, seconds=LOOKUP_S + 0.12))
    table.kept.clear()
    table.scheduler.store_planner.rates.__init__(10.0, 1e6, LOOKUP_S)
    turned = table.turn(table.fetched(arrived="+++"))
    # the store said where its run ends: there is nothing to ask
    assert turned.lookups == []
    assert len(turned.ins) == 1
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 12)


@pytest.mark.parametrize(
    ("config", "asks"),
    [
        ({"prefill_tokens_per_s": 1e6}, False),  # 12 us of computing, a lookup alone takes longer
        ({"lookup_s": 1.3}, False),
        ({"lookup_s": 1.1}, True),
        ({"fetch_nbytes_per_s": 2000.0}, False),
        ({"fetch_nbytes_per_s": 3000.0}, True),
        ({"fetch_min_tokens": 13}, False),
        ({"fetch_min_tokens": 12}, True),
        ({"store": False}, False),
    ],
)
def test_nothing_is_asked_for_where_computing_is_faster(config, asks):
    table = make_table(A, **config)
    turned = table.turn(table.request(1, A, 2))
    assert len(turned.lookups) == asks
    assert turned.starts == ([] if asks else [1])
    table.run()


def test_nothing_is_fetched_where_computing_what_is_there_is_faster():
    # three blocks of six would be worth it, one is not: the lookup was slow, and reading has become slow
    table = make_table(range(25))
    table.turn(table.request(1, range(25), 1))
    table.scheduler.store_planner.rates.fetched(1000, 100.0)
    turned = table.turn(table.looked_up())
    assert turned.fetches == []
    assert turned.starts == [1]
    table.run()
    assert table.stats.host_evictions == 0
    assert table.stats.free_host_blocks == 64


@pytest.mark.parametrize("late", [False, True])
def test_a_lookup_that_was_not_answered_costs_no_second_wait(late):
    table = make_table(A)
    (lookup,) = table.turn(table.request(1, A, 2)).lookups
    table.now = lookup.deadline if late else 1.01
    turned = table.turn(table.looked_up(count=0, answered=False, seconds=0.01))
    assert turned.cached == {1: 0}
    assert table.stats.fetch_cut_offs == late
    table.run()
    assert table.is_empty()


def test_a_fetch_that_is_cut_off_uses_the_leading_run():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    (fetch,) = table.turn(table.looked_up()).fetches
    turned = table.turn(table.fetched(arrived="+-+", late=True))
    (into,) = turned.ins
    assert into.host == fetch.host[:1]
    assert (turned.lookups, turned.fetches) == ([], [])
    assert (table.stats.fetch_cut_offs, table.stats.late_transfers) == (1, 1)
    assert table.turn(table.copied()).cached == {1: 4}
    while table.flying:
        table.turn(table.done())
    assert table.finished[1].cached_tokens == (0, 0, 4)
    # the late block's place is nobody else's until its lease is back
    index = table.scheduler.index
    assert index.pool.num_host_free == 64 - 3
    table.turn(table.returned(fetch_id(table), "+-+"))
    assert index.pool.num_host_free == 64 - 2
    assert table.is_empty()


def test_a_fetch_of_nothing_is_computed_at_once():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    turned = table.turn(table.fetched(arrived="---"))
    assert turned.cached == {1: 0}
    assert turned.lookups == []
    assert table.stats.free_host_blocks == 64
    table.run()
    assert table.is_empty()


def test_what_came_by_another_way_does_not_count_as_from_the_store():
    table = make_table(A, max_step_tokens=64)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    table.kept.clear()
    # others share the fetch, but this one has the blocks on the device by the time that it is matched
    table.turn(table.request(2, [*range(4), 9, 9], 1))
    turned = table.turn(table.fetched(arrived="---"))
    assert turned.cached == {1: 0}
    table.run()
    assert table.finished[2].cached_tokens == (4, 0, 0)


@pytest.mark.parametrize(("arrived", "indexed"), [("+++", True), ("+--", False)])
def test_a_late_block_that_passes_its_checks_is_indexed_on_the_host(arrived, indexed):
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    table.turn(table.abort(1))
    table.turn(table.fetched(arrived="+--", late=True))
    assert table.places(A) == ["host", "", ""]
    table.turn(table.returned(fetch_id(table), arrived))
    assert table.places(A) == (["host"] * 3 if indexed else ["host", "", ""])
    assert (table.stats.fetched_blocks, table.stats.late_fetched_blocks) == (1, 2 if indexed else 0)
    assert table.is_empty()
    turned = table.turn(table.request(2, A, 2))
    assert [len(into.host) for into in turned.ins] == ([3] if indexed else [])
    assert [len(lookup.keys) for lookup in turned.lookups] == ([] if indexed else [2])
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize("state", ["pending", "indexed"])
def test_a_late_block_whose_identity_is_there_is_dropped(state):
    table = make_table(A)
    table.turn(table.request(1, A, 8))
    (fetch,) = table.turn(table.looked_up()).fetches
    assert table.turn(table.fetched(arrived="---", late=True)).cached == {1: 0}
    if state == "indexed":
        table.turn(table.done())
    ours = [table.scheduler.index.get(key) for key in fetch.keys]
    table.turn(table.returned(fetch_id(table), "+++"))
    assert [table.scheduler.index.get(key) for key in fetch.keys] == ours
    assert table.places(A) == ["device"] * 3
    assert table.stats.free_host_blocks == 64
    table.run()
    assert table.is_empty()


def test_what_arrives_in_time_and_is_there_already_is_dropped_too():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    # somebody that does not ask the store computes the same
    table.scheduler.store_planner.enabled = False
    turned = table.turn(table.request(2, A, 2))
    assert turned.starts == [2]
    table.turn(table.done())
    table.turn(table.fetched())
    assert table.places(A) == ["device"] * 3
    table.run()
    assert table.finished[1].num_rows == 14
    assert table.stats.free_host_blocks == 64
    assert table.is_empty()


def test_what_a_lease_brings_while_its_request_is_loading_is_not_taken_for_kv_on_the_device():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    turned = table.turn(table.fetched(arrived="+--", late=True))
    assert [len(into.host) for into in turned.ins] == [1]
    table.turn(table.returned(fetch_id(table), "+++"))
    assert table.places(A) == ["both", "host", "host"]
    assert table.turn(table.copied()).cached == {1: 4}
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 4)
    assert table.is_empty()


def test_a_fetch_makes_room_of_copies_that_unused_blocks_have_on_the_device():
    table = make_table(range(100, 113), num_host_blocks=3, num_blocks=16)
    table.run(table.request(1, A, 1))
    for block in table.scheduler.index.pool.live():
        table.scheduler.swap_planner.keep(block)
    table.turn()
    table.answer()
    assert table.places(A) == ["both"] * 3
    table.turn(table.request(2, range(100, 113), 1))
    (fetch,) = table.turn(table.looked_up()).fetches
    # a third of it is the half that may be fetched ahead
    assert len(fetch.host) == 1
    assert sorted(table.places(A)) == ["both", "both", "device"]
    table.run()
    assert table.finished[2].cached_tokens == (0, 0, 4)


def test_a_fetch_does_not_push_out_the_blocks_that_it_continues():
    prompt = range(25)
    table = make_table(prompt, num_host_blocks=4, num_blocks=16)
    table.scheduler.store_planner.enabled = False
    # the host is full: two blocks of the prompt, used longest ago, and two of another one
    leave_on_host(table, range(9))
    leave_on_host(table, range(300, 309))
    assert table.places(prompt) == ["host", "host", "", "", "", ""]
    table.scheduler.store_planner.enabled = True
    table.turn(table.request(1, prompt, 1))
    table.run()
    assert table.finished[1].cached_tokens == (0, 8, 8)
    assert table.is_empty()
