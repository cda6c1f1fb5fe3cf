"""The scheduler with a store behind the host: lookups, fetches with bounded regret, writes (DESIGN 7)."""

from __future__ import annotations

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.catalog import FetchEnded, LeaseReturned, LookedUp, StoreEnded
from tests.helpers import Table
from tests.test_scheduler_tiers import leave_on_host

A = range(13)  # three full blocks that a hit may cover
LOOKUP_S = 0.002


def make_table(*prompts, **config):
    """With a store that has the full blocks of these prompts. Ten tokens a second are computed, a block is read in a
    millisecond: what the store has is always worth a fetch."""
    values = {
        "num_host_blocks": 64, "store": True, "prefill_tokens_per_s": 10.0, "fetch_nbytes_per_s": 1e6,
        "block_nbytes": 1000, "lookup_s": LOOKUP_S, "write_through": "off", "write_back": False,
    }  # fmt: skip
    table = Table(**{**values, **config})
    for prompt in prompts:
        table.kept.update({(table.namespace, key): None for key in table.keys(prompt)})
    return table


def go_on(table):
    """Steps and copies, one after the other, while the store is silent; yields each turn."""
    while table.flying or table.copies:
        steps = [table.done()] if table.flying else []
        yield table.turn(*steps, *[table.copied() for _ in list(table.copies)])


# -- reading


def test_what_the_store_has_is_looked_up_fetched_brought_in_and_used():
    table = make_table(A)
    turned = table.turn(table.request(1, A, 2))
    (lookup,) = turned.lookups
    assert lookup.keys == tuple(table.keys(A))
    assert turned.steps == []
    turned = table.turn(table.looked_up())
    (fetch,) = turned.fetches
    assert fetch.keys == lookup.keys
    assert len(set(fetch.host)) == len(set(fetch.slots)) == len(fetch.generations) == 3
    assert table.stats.waiting_for_store == 1
    turned = table.turn(table.fetched())
    (into,) = turned.ins
    assert into.host == fetch.host
    # the rows went to the slots that the blocks keep
    assert (into.slots, into.generations) == (fetch.slots, fetch.generations)
    assert table.turn(table.copied()).cached == {1: 12}
    # it was admitted: what came for it is a block of the host like any other
    assert len(table.scheduler.index._host_used) == 3
    table.run()
    end = table.finished[1]
    assert (end.cached_tokens, end.num_rows) == ((0, 0, 12), 14)
    stats = table.stats
    assert (stats.fetched_blocks, stats.hit_tokens, stats.hit_tokens_store) == (3, 12, 12)
    assert table.is_empty()


def test_without_capture_a_fetch_names_no_slots():
    table = make_table(A, capture=False)
    table.turn(table.request(1, A, 2, start=-1))
    (fetch,) = table.turn(table.looked_up()).fetches
    assert (fetch.slots, fetch.generations, len(fetch.host)) == ((), (), 3)
    table.run()


def test_only_what_is_in_no_tier_of_ours_is_looked_up():
    table = make_table(range(25))
    table.run(table.request(1, [*range(9), 77], 1))
    before = len(table.finished)
    assert before == 1
    turned = table.turn(table.request(2, range(25), 1))
    (lookup,) = turned.lookups
    assert lookup.keys == tuple(table.keys(range(25))[2:])
    table.run()
    assert table.finished[2].cached_tokens == (8, 0, 16)


def test_the_open_tail_is_never_looked_up():
    table = make_table(range(12))
    (lookup,) = table.turn(table.request(1, range(12), 1)).lookups
    # the last token is always computed
    assert len(lookup.keys) == 2


def test_a_hundred_requests_for_one_prefix_read_it_once():
    table = make_table(A, num_blocks=400, max_running=100, max_step_tokens=512)
    turned = table.turn(*(table.request(key, [*A, key], 1) for key in range(1, 60)))
    assert len(turned.lookups) == 1
    turned = table.turn(*(table.request(key, [*A, key], 1) for key in range(60, 80)))
    assert turned.lookups == []
    turned = table.turn(table.looked_up())
    assert len(turned.fetches) == 1
    turned = table.turn(*(table.request(key, [*A, key], 1) for key in range(80, 101)))
    assert turned.lookups == []
    assert table.stats.waiting == 100
    turned = table.turn(table.fetched())
    assert (len(turned.ins), turned.lookups, turned.fetches) == (1, [], [])
    turned = table.turn(table.copied())
    assert turned.cached == dict.fromkeys(range(1, 101), 12)
    table.run()
    assert {end.cached_tokens for end in table.finished.values()} == {(0, 0, 12)}
    assert table.stats.fetched_blocks == 3
    assert table.is_empty()


def test_who_wants_more_than_the_fetch_brings_asks_for_the_rest():
    table = make_table(range(25))
    table.turn(table.request(1, A, 1))
    turned = table.turn(table.request(2, range(25), 1))
    # its first missing block is being looked up
    assert turned.lookups == []
    turned = table.turn(table.looked_up())
    assert len(turned.fetches) == 1
    turned = table.turn(table.fetched())
    (lookup,) = turned.lookups
    assert lookup.keys == tuple(table.keys(range(25))[3:])
    table.run()
    assert table.finished[2].cached_tokens == (0, 0, 24)


def test_who_shares_only_the_beginning_of_a_fetch_is_matched_when_it_ends():
    table = make_table(range(25))
    table.turn(table.request(1, range(25), 1))
    table.turn(table.request(2, [*range(8), *range(70, 75)], 1))
    table.turn(table.looked_up())
    turned = table.turn(table.fetched())
    # the block after the shared ones is its own: only that is asked for, once
    assert [len(lookup.keys) for lookup in turned.lookups] == [1]
    turned = table.turn(table.looked_up())
    assert (turned.lookups, turned.fetches) == ([], [])
    table.run()
    assert table.finished[2].cached_tokens == (0, 0, 8)


def test_what_a_leader_is_computing_is_not_looked_up():
    table = make_table(A, max_step_tokens=64)
    table.turn(table.request(1, A, 4))
    assert table.turn(table.looked_up(count=0)).starts == [1]
    turned = table.turn(table.request(2, A, 4))
    assert turned.lookups == []
    assert table.turn(table.done()).cached == {2: 12}
    table.run()


def test_a_miss_is_computed_and_not_asked_for_again():
    table = make_table()
    table.turn(table.request(1, A, 2))
    turned = table.turn(table.looked_up())
    assert turned.cached == {1: 0}
    assert turned.fetches == []
    while table.flying:
        assert table.turn(table.done()).lookups == []
    assert table.finished[1].cached_tokens == (0, 0, 0)
    assert table.is_empty()


def test_who_waits_for_room_does_not_ask_again_and_again():
    table = make_table(num_blocks=4)
    table.turn(table.request(1, [1], 8))
    asked = [len(table.turn(table.request(2, A, 2)).lookups), len(table.turn(table.looked_up()).lookups)]
    asked += [len(turned.lookups) for turned in go_on(table)]
    assert sum(asked) == 1
    assert table.finished[2].reason == "length"


def test_others_go_on_while_somebody_waits_for_the_store():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    assert table.turn(table.request(2, [1, 2], 2)).starts == [2]
    table.turn(table.looked_up())
    assert table.turn(table.request(3, [3, 4], 2), table.done()).starts == [3]
    while table.flying:
        table.turn(table.done())
    assert sorted(table.finished) == [2, 3]
    table.run()
    assert table.is_empty()


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
    rates = table.scheduler.storer.rates
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
    assert table.scheduler.storer.rates.fetch_s(3000) == pytest.approx(0.123)


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
    table.scheduler.storer.rates.__init__(10.0, 1e6, LOOKUP_S)
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
    table.scheduler.storer.rates.fetched(1000, 100.0)
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
    assert (table.stats.fetch_cut_offs, table.stats.late_leases) == (1, 1)
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


def fetch_id(table):
    (number,) = table.late
    return number


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
    table.scheduler.storer.enabled = False
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
        table.scheduler.copier.keep(block)
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
    table.scheduler.storer.enabled = False
    # the host is full: two blocks of the prompt, used longest ago, and two of another one
    leave_on_host(table, range(9))
    leave_on_host(table, range(300, 309))
    assert table.places(prompt) == ["host", "host", "", "", "", ""]
    table.scheduler.storer.enabled = True
    table.turn(table.request(1, prompt, 1))
    table.run()
    assert table.finished[1].cached_tokens == (0, 8, 8)
    assert table.is_empty()


# -- ends while waiting


@pytest.mark.parametrize("when", ["looking up", "fetching", "fetched"])
def test_abort_while_waiting_for_the_store(when):
    table = make_table(A, num_blocks=4)
    if when == "fetched":
        # no room: what came for it lies on the host
        table.turn(table.request(9, [1], 8))
    table.turn(table.request(1, A, 2))
    if when != "looking up":
        table.turn(table.looked_up())
    if when == "fetched":
        table.turn(table.fetched())
    turned = table.turn(table.abort(1))
    assert (turned.finish.reason, turned.finish.cached_tokens) == ("abort", (0, 0, 0))
    if when == "looking up":
        # nobody wants it any more: it is not fetched
        assert table.turn(table.looked_up()).fetches == []
        assert table.stats.free_host_blocks == 64
    elif when == "fetching":
        table.turn(table.fetched())
        assert table.places(A) == ["host"] * 3
    table.run()
    assert table.is_empty()
    # whatever came may make room for others
    assert table.scheduler.index.pool.num_host_free + len(table.scheduler.index._host_only) == 64


def test_a_deadline_while_the_store_hangs():
    table = make_table(A)
    table.turn(table.request(1, A, 2, deadline=1.05))
    assert table.turn(table.timer(1.05)).finish.reason == "deadline"
    table.turn(table.looked_up(count=0, answered=False))
    assert table.is_empty()


def test_when_the_first_who_waited_ends_the_others_get_what_comes():
    table = make_table(A)
    table.turn(table.request(1, A, 2), table.request(2, A, 2))
    table.turn(table.abort(1))
    assert len(table.turn(table.looked_up()).fetches) == 1
    table.turn(table.request(3, A, 2), table.abort(2))
    assert len(table.turn(table.fetched()).ins) == 1
    table.run()
    assert table.finished[3].cached_tokens == (0, 0, 12)
    assert table.is_empty()


# -- no loops


@pytest.mark.parametrize("num_host", [1, 2, 3, 5])
def test_a_host_tier_that_is_smaller_than_the_prompt_makes_no_lookup_loop(num_host):
    prompt = range(41)
    table = make_table(prompt, num_host_blocks=num_host)
    table.turn(table.request(1, prompt, 2))
    asked = 1
    fetched = 0
    for _ in range(30):
        if not table.in_flight:
            break
        turned = table.turn(*table.answers())
        asked += len(turned.lookups)
        fetched += len(turned.fetches)
    assert not table.in_flight
    assert table.flying
    assert asked <= 2
    assert fetched <= 2
    table.run()
    # what was fetched was used
    assert table.finished[1].cached_tokens[2] >= 4
    assert table.is_empty()


def test_what_was_brought_and_lost_again_is_computed():
    table = make_table(A, num_blocks=4, num_host_blocks=6)
    table.turn(table.request(9, [1], 8))
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    table.turn(table.fetched())
    # it has to wait for room, and what came for it is lost meanwhile
    index = table.scheduler.index
    table.scheduler.storer.let_go(table.scheduler._sequences[1])
    for key in table.keys(A):
        index._leave_host(index.get(key))
    assert [lookup for turned in go_on(table) for lookup in turned.lookups] == []
    assert table.finished[1].reason == "length"
    assert table.finished[1].cached_tokens == (0, 0, 0)


def test_what_came_for_a_request_is_not_evicted_before_it_is_admitted():
    table = make_table(A, num_blocks=6, num_host_blocks=6, max_running=1)
    table.turn(table.request(9, range(50, 66), 9))
    table.turn(table.looked_up())
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    turned = table.turn(table.fetched())
    assert turned.ins == []
    index = table.scheduler.index
    # whoever looks for room on the host does not get it from these
    while index.make_host_room(for_fetch=True):
        index.pool.allocate_host().host_moves = 1
    assert table.places(A) == ["host"] * 3


def test_lookups_are_not_sent_ahead_of_what_half_of_the_host_holds():
    prompts = [range(first, first + 13) for first in range(0, 1000, 100)]
    table = make_table(*prompts, num_blocks=8, num_host_blocks=8, max_running=1)
    table.turn(table.request(99, [1], 20))
    for key, prompt in enumerate(prompts):
        table.turn(table.request(key, prompt, 1), *table.answers())
        # what is asked for counts, before anybody knows how much of it is there
        assert table.stats.free_host_blocks >= 4
    table.answer()
    assert table.stats.free_host_blocks >= 4
    table.run()
    assert {end.cached_tokens for end in table.finished.values()} <= {(0, 0, 0), (0, 0, 12)}
    assert sum(end.cached_tokens == (0, 0, 12) for end in table.finished.values()) >= 3
    assert table.is_empty()


def test_a_request_that_needs_more_than_half_of_the_host_may_ask_if_nobody_else_does():
    table = make_table(range(41), num_host_blocks=6)
    table.turn(table.request(1, range(41), 1))
    assert len(table.lookups) == 1
    assert table.turn(table.request(2, A[1:], 1)).lookups == []
    assert [len(fetch.keys) for fetch in table.turn(table.looked_up(0)).fetches] == [3]
    table.run()
    assert table.is_empty()


def test_where_the_host_has_no_room_nothing_is_fetched():
    table = make_table(A, num_host_blocks=3, write_through="all", max_running=1)
    # a write that hangs holds all of it
    table.turn(table.request(9, range(100, 113), 1))
    table.turn(table.looked_up())
    table.turn(table.done())
    table.turn(table.copied())
    assert len(table.puts) == 1
    table.turn(table.request(1, A, 2))
    turned = table.turn(table.looked_up())
    assert turned.fetches == []
    assert turned.cached == {1: 0}
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (LookedUp(lookup_id=5, count=0, seconds=0.0, answered=True), "lookup 5"),
        (LookedUp(lookup_id=0, count=4, seconds=0.0, answered=True), "lookup 0 of 4 blocks"),
        (FetchEnded(fetch_id=5, arrived=(), late=False, seconds=0.0, nbytes=0), "fetch 5 ended"),
        (StoreEnded(put_id=5, stored=(), late=False, seconds=0.0, nbytes=0), "write 5 ended"),
        (LeaseReturned(lease_id=5, arrived=()), "lease 5 was returned"),
    ],
)
def test_an_answer_that_nobody_asked_for_is_a_defect(event, message):
    table = make_table()
    table.turn(table.request(1, A, 2))
    with pytest.raises(InvariantBroken, match=message):
        table.turn(event)


def test_a_fetch_must_tell_of_all_its_blocks():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    table.turn(table.looked_up())
    with pytest.raises(InvariantBroken, match="fetch"):
        table.turn(table.fetched(arrived="++"))


# -- writing


def writer(**config):
    """Nothing is worth a lookup: only writes are seen."""
    return make_table(**{"prefill_tokens_per_s": 1e9, **config})


def written(table):
    return sorted(key for _, key in table.kept)


@pytest.mark.parametrize(("what", "blocks"), [("off", 0), ("prompt", 3), ("all", 5)])
def test_which_blocks_are_written_through(what, blocks):
    table = writer(write_through=what)
    table.run(table.request(1, range(14), 9))
    # 22 tokens were forwarded
    whole = [*range(14), *table.finished[1].token_ids]
    assert written(table) == sorted(table.keys(whole[:22])[:blocks])
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (blocks, 0)
    assert table.is_empty()


def test_writing_goes_by_way_of_the_host_while_the_request_runs():
    table = writer(write_through="all")
    (start,) = table.turn(table.request(1, A, 9)).step.starts
    turned = table.turn(table.done())
    (out,) = turned.outs
    assert out.device == start.blocks[:3]
    assert len(turned.steps) == 1
    turned = table.turn(table.copied())
    (put,) = turned.puts
    assert (put.keys, put.host, put.slots) == (tuple(table.keys(A)), out.host, start.slots[:3])
    assert put.namespace == table.namespace
    # nobody waits for it
    puts = dict(table.puts)
    while table.flying:
        table.turn(table.done())
    assert 1 in table.finished
    assert puts.keys() <= table.puts.keys()
    table.run()
    assert table.is_empty()


def test_a_block_is_written_once_however_often_it_is_hit():
    table = writer(write_through="all")
    for key in range(3):
        table.run(table.request(key, A, 1))
    assert table.stats.written_blocks == 3
    assert table.stats.swapped_out_blocks == 3


def test_what_was_fetched_is_not_written_back():
    table = make_table(A, write_through="all", write_back=True)
    table.run(table.request(1, A, 1))
    assert table.finished[1].cached_tokens == (0, 0, 12)
    assert table.stats.written_blocks == 0


def preempting(**config):
    """Two requests, of which the newer one is preempted when both want a third block."""
    table = writer(num_blocks=5, decode_reserve_blocks=0, **config)
    table.turn(table.request(1, range(8), 5), table.request(2, range(50, 58), 5))
    return table


@pytest.mark.parametrize(("write_back", "store"), [(True, True), (True, False), (False, True)])
def test_blocks_of_the_preempted_go_to_the_host_and_from_there_to_the_store(write_back, store):
    table = preempting(write_back=write_back, store=store)
    turned = table.turn(table.done())
    assert table.stats.preemptions == 1
    assert [len(out.device) for out in turned.outs] == ([2] if write_back else [])
    # the other one goes on
    assert [append.key for append in turned.step.appends] == [1]
    if write_back:
        turned = table.turn(table.copied())
        assert [put.keys for put in turned.puts] == ([tuple(table.keys(range(50, 58)))] if store else [])
    table.run()
    assert table.stats.written_blocks == (2 if write_back and store else 0)
    assert [table.finished[key].num_rows for key in (1, 2)] == [12, 12]
    # counted at first admission, whatever comes back later
    assert table.finished[2].cached_tokens == (0, 0, 0)
    assert table.is_empty()


@pytest.mark.parametrize("answer", ["at once", "hangs"])
def test_the_preempted_are_not_written_twice(answer):
    table = preempting(write_back=True, write_through="all", num_host_blocks=16)
    for _ in range(3):
        if table.stats.preemptions:
            break
        turned = table.turn(table.done(), *(table.copied() for _ in list(table.copies)))
    assert table.stats.preemptions == 1
    seen = []
    for _ in range(40):
        events = [table.done()] if table.flying else []
        events += [table.copied() for _ in list(table.copies)]
        if answer == "at once":
            events += [table.stored() for _ in list(table.puts)]
        turned = table.turn(*events)
        seen += [key for put in turned.puts for key in put.keys]
    assert sorted(seen) == sorted(set(seen))
    table.run()
    assert table.is_empty()


def test_preempted_while_its_blocks_are_being_written_they_are_not_written_again():
    table = writer(num_blocks=7, decode_reserve_blocks=0, write_through="all", write_back=True)
    table.turn(table.request(1, range(9), 9), table.request(2, range(50, 59), 9))
    table.turn(table.done())
    table.turn(table.copied())
    assert len(table.puts) == 1
    for _ in zip(range(9), go_on(table), strict=False):
        pass
    assert table.stats.preemptions == 1
    held = [key for put in table.puts.values() for key in put.keys]
    assert sorted(held) == sorted(set(held))
    table.run()
    assert table.is_empty()


def test_what_has_to_make_room_before_its_turn_is_dropped_and_counted():
    table = writer(write_through="all", num_host_blocks=4, num_blocks=32, max_step_tokens=64)
    table.turn(table.request(1, range(33), 1))
    turned = table.turn(table.done())
    # eight blocks were sealed, four have room on the host
    assert [len(out.host) for out in turned.outs] == [4]
    assert table.stats.dropped_writes == 4
    table.run()
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (4, 4)
    assert table.is_empty()


def test_what_was_dropped_is_not_written_by_the_way_later():
    table = writer(write_through="all", num_host_blocks=2, num_blocks=8, max_step_tokens=64)
    table.turn(table.request(1, A, 1))
    table.turn(table.done())
    assert table.stats.dropped_writes == 1
    table.run()
    assert table.stats.written_blocks == 2
    # under pressure it goes to the host after all
    table.run(table.request(2, range(100, 129), 1))
    assert table.stats.swapped_out_blocks > 2
    written = [key for _, key in table.kept]
    assert len(set(written) & set(table.keys(A))) == 2
    assert table.is_empty()


def test_a_block_evicted_from_the_host_before_it_is_written_is_dropped():
    table = writer(write_through="all", num_host_blocks=64, num_blocks=128, max_step_tokens=512)
    # four writes at a time, of sixteen blocks each at most; each prompt is one write
    for key in range(4):
        table.turn(table.request(key, range(key * 100, key * 100 + 5), 1))
        table.turn(table.done())
        table.turn(table.copied())
    assert len(table.puts) == 4
    table.turn(table.request(5, range(500, 509), 1))
    table.turn(table.done())
    turned = table.turn(table.copied())
    # a store that hangs gets no more
    assert turned.puts == []
    assert table.stats.writing == 6
    index = table.scheduler.index
    block = index.get(table.keys(range(500, 509))[0])
    index._leave_host(block)
    table.turn(*[table.stored() for _ in range(4)])
    table.run()
    # nor is the one behind it, which nobody would find
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (4, 2)
    assert not block.wanted


def test_a_write_holds_its_host_blocks_until_it_has_ended():
    table = writer(write_through="all", num_host_blocks=3, num_blocks=4)
    table.turn(table.request(1, A, 1))
    table.turn(table.done())
    (put,) = table.turn(table.copied()).puts
    index = table.scheduler.index
    assert not index.make_host_room(for_fetch=True)
    # evicted from the device, but not from the host
    table.turn(table.request(2, range(100, 116), 1))
    assert table.places(A) == ["host"] * 3
    table.turn(table.stored(late=True, stored="+--"))
    assert table.stats.late_leases == 1
    assert [block.host for block in index._host_only] == [put.host[0]]
    table.turn(table.returned(fetch_id(table), "++-"))
    assert len(index._host_only) == 3
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (2, 1)
    table.run()
    assert table.is_empty()


def test_a_block_that_waits_twice_for_its_turn_is_written_once():
    table = writer(write_through="all", num_blocks=128)
    for key in range(4):
        table.turn(table.request(key, range(key * 100, key * 100 + 5), 1))
        table.turn(table.done())
        table.turn(table.copied())
    table.turn(table.request(5, range(500, 505), 1))
    table.turn(table.done())
    assert table.turn(table.copied()).puts == []
    # it had to make room on the host, and is copied out once more before a write is possible
    index = table.scheduler.index
    block = index.get(table.keys(range(500, 505))[0])
    index._leave_host(block)
    table.scheduler.copier.keep(block)
    table.turn()
    assert table.turn(table.copied()).puts == []
    puts = [table.turn(table.stored()).puts for _ in range(4)]
    assert [key for batch in puts for put in batch for key in put.keys] == table.keys(range(500, 505))
    table.run()
    assert table.is_empty()


def test_a_lease_may_come_back_for_a_write_of_which_all_was_stored():
    table = writer(write_through="all")
    table.turn(table.request(1, A, 1))
    table.turn(table.done())
    table.turn(table.copied())
    table.turn(table.stored(late=True))
    assert (table.stats.written_blocks, table.stats.late_leases) == (3, 1)
    table.turn(table.returned(fetch_id(table), "+++"))
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (3, 0)
    assert table.is_empty()


def test_late_writes_count_as_writes_in_flight():
    table = writer(write_through="all", num_blocks=128)
    for key in range(4):
        table.turn(table.request(key, range(key * 100, key * 100 + 5), 1))
        table.turn(table.done())
        table.turn(table.copied())
    table.turn(*[table.stored(late=True, stored="-") for _ in range(4)])
    table.turn(table.request(5, range(500, 505), 1))
    table.turn(table.done())
    assert table.turn(table.copied()).puts == []
    assert len(table.turn(table.returned(min(table.late), "+")).puts) == 1
    for number in list(table.late):
        table.turn(table.returned(number, "-"))
    table.run()
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (2, 3)
    assert table.is_empty()


def test_what_the_store_refused_is_dropped_and_stays_in_the_cache():
    table = writer(write_through="all")
    table.turn(table.request(1, A, 1))
    table.turn(table.done())
    table.turn(table.copied())
    assert table.turn(table.stored(stored="+-+")).puts == []
    assert (table.stats.written_blocks, table.stats.dropped_writes) == (2, 1)
    assert table.turn(table.request(2, A, 1)).cached == {2: 12}
    table.run()
    assert table.is_empty()


def test_many_blocks_are_written_in_several_writes():
    table = writer(write_through="all", num_host_blocks=128, num_blocks=128, max_step_tokens=512)
    table.turn(table.request(1, range(70 * 4 + 1), 1))
    table.turn(table.done())
    turned = table.turn(*[table.copied() for _ in list(table.copies)])
    assert [len(put.keys) for put in turned.puts] == [16, 16, 16, 16]
    assert [len(put.keys) for put in table.turn(table.stored()).puts] == [6]
    table.run()
    assert table.stats.written_blocks == 70


# -- the order of eviction: by last use, leaves first, whatever transfers end when


def in_order(table, held, tokens):
    numbers = {key: number for number, key in enumerate(table.keys(tokens))}
    return [numbers[block.key] for block in held if block.key in numbers]


def play_to_the_writes(table, *requests):
    table.turn(*requests)
    for _ in range(40):
        if table.flying:
            table.turn(table.done())
        elif table.copies:
            table.turn(table.copied())
        else:
            return
    raise AssertionError("it does not end")


def test_a_write_that_ends_is_no_use_and_leaves_still_go_first():
    table = make_table(write_through="all", fetch_min_tokens=1000, num_host_blocks=32, num_blocks=32)
    old, new = range(17), range(100, 117)
    play_to_the_writes(table, table.request(1, old, 1))
    first = min(table.puts)
    play_to_the_writes(table, table.request(2, new, 1))
    while len(table.puts) > 1:
        table.turn(table.stored(max(table.puts)))
    table.turn(table.stored(first))
    index = table.scheduler.index
    for held in (index._clean, index._host_clean):
        assert in_order(table, held, old) == [3, 2, 1, 0]
        assert in_order(table, held, new) == [3, 2, 1, 0]
        assert [block.key in table.keys(old) for block in held] == [True] * 4 + [False] * 4


def test_what_a_fetch_brought_goes_leaves_first():
    table = make_table(A)
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.abort(1))
    table.turn(table.fetched())
    assert in_order(table, table.scheduler.index._host_only, A) == [2, 1, 0]


def test_what_is_here_behind_a_gap_is_not_fetched_again():
    table = make_table(range(33), num_blocks=16, num_host_blocks=32, max_step_tokens=64)
    table.turn(table.request(1, range(33), 1))
    table.turn(table.looked_up(count=0))
    table.run()
    index = table.scheduler.index
    root = index.get(table.keys(range(33))[0])
    # the first block of eight is gone from everywhere
    index._unlist(root)
    root.wanted = False
    index._lose(root)
    turned = table.turn(table.request(2, range(33), 1))
    (lookup,) = turned.lookups
    assert lookup.keys == tuple(table.keys(range(33))[:1])
    turned = table.turn(table.looked_up())
    assert [len(fetch.keys) for fetch in turned.fetches] == [1]
    table.turn(table.fetched())
    table.run()
    assert sum(table.finished[2].cached_tokens) == 32


def test_late_reads_hold_up_no_writes():
    table = make_table(*[range(first, first + 13) for first in range(0, 600, 100)], write_through="all", max_running=1)
    for key in range(6):
        table.turn(table.request(key, range(key * 100, key * 100 + 13), 1))
        table.turn(table.looked_up())
        table.turn(table.fetched(arrived="---", late=True))
        play_to_the_writes(table)
    assert len(table.late) >= 4
    assert table.puts, "writes wait behind reads that are late"
    while table.puts:
        table.turn(table.stored())
    assert table.stats.written_blocks >= 12


def test_the_queue_of_writes_is_bounded_while_a_store_hangs():
    table = make_table(write_through="all", fetch_min_tokens=1000, num_host_blocks=8, num_blocks=8)
    for key in range(40):
        play_to_the_writes(table, table.request(key, range(key * 100, key * 100 + 13), 1))
    assert table.stats.writing <= 2 * 8 + 4 * 16 + 1
    assert len(table.scheduler.storer._queue) <= 17
    table.run()
    assert table.is_empty()
