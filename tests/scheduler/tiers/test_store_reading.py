"""The scheduler with a store behind the host: lookups and fetches, ends meanwhile, no loops (docs/design.md,
section 7)."""

from __future__ import annotations

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.catalog import FetchEnded, LateTransferEnded, LookedUp, StoreEnded
from tests.scheduler.tiers.scenes import go_on, make_table

A = range(13)  # three full blocks that a hit may cover


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


def test_a_sequence_that_wants_more_than_the_fetch_brings_asks_for_the_rest():
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


def test_a_sequence_that_shares_only_the_beginning_of_a_fetch_is_matched_when_it_ends():
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


def test_a_sequence_that_waits_for_room_does_not_ask_again_and_again():
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


def test_when_the_first_waiting_sequence_ends_the_others_get_the_fetched_blocks():
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
    table.scheduler.store_planner.let_go(table.scheduler.sequences[1])
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
        index.pool.allocate_host().hold("write")
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


def test_a_request_that_needs_more_than_half_of_the_host_may_ask_if_no_other_does():
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
        (LateTransferEnded(transfer_id=5, arrived=()), "late transfer 5 ended"),
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
