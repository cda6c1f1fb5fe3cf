"""The scheduler of a recurrent model with a store: objects of some blocks have a state, and fetches end there."""

from __future__ import annotations

import pytest

from fdasync.cache.blocks import Block
from tests.scheduler.tiers.scenes import make_table

A = range(100, 135)  # 8 full blocks and 3 tokens; states are stored behind blocks 3 and 6


def recurrent(*prompts, **config):
    values = {
        "recurrent": True, "num_snapshots": 8, "num_host_snapshots": 8, "state_every_tokens": 12,
        "max_step_tokens": 64, "snapshot_nbytes": 1000,
    }  # fmt: skip
    return make_table(*prompts, **{**values, **config})


def writing(**config):
    return recurrent(**{"write_through": "all", "write_back": True, **config})


def kept(table, prompt) -> str:
    """Which of its full blocks the store has: "x" or "."."""
    return "".join("x" if (table.namespace, key) in table.kept else "." for key in table.keys(prompt))


def puts(table, *events):
    """What is written, until nothing is in flight: by key, whether with a state."""
    found = {}
    turned = table.turn(*events)
    for _ in range(100):
        for put in turned.puts:
            places = put.snapshots_host or (-1,) * len(put.keys)
            found.update({key: place >= 0 for key, place in zip(put.keys, places, strict=True)})
        steps = [table.done()] if table.flying else []
        if not steps and not table.in_flight:
            return found
        turned = table.turn(*steps, *table.answers())
    raise AssertionError("it does not end")


def test_a_fetch_ends_at_the_last_state_of_the_store_and_the_sequence_goes_on_from_it():
    table = recurrent(A)
    (lookup,) = table.turn(table.request(1, A, 2)).lookups
    assert lookup.keys == tuple(table.keys(A))[:6]
    (fetch,) = table.turn(table.looked_up()).fetches
    assert [place >= 0 for place in fetch.snapshots_host] == [False, False, True] * 2
    assert len(set(fetch.snapshots_host)) == 3
    turned = table.turn(table.fetched())
    assert len(turned.ins) == 2
    assert [copy.snapshots_host for copy in turned.ins if copy.snapshots_host] == [(fetch.snapshots_host[5],)]
    turned = table.turn(table.copied(), table.copied())
    (start,) = turned.step.starts
    assert start.num_cached == 24
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 24)
    assert table.is_empty()


@pytest.mark.parametrize(("count", "cached"), [(6, 24), (5, 12), (3, 12), (2, 0), (0, 0)])
def test_what_the_store_has_behind_its_last_state_is_of_no_use(count, cached):
    table = recurrent(A)
    table.turn(table.request(1, A, 2))
    turned = table.turn(table.looked_up(count=count))
    assert [len(fetch.keys) for fetch in turned.fetches] == ([cached // 4] if cached else [])
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, cached)


def test_states_before_the_last_one_of_a_fetch_make_room_first():
    table = recurrent(A, num_host_snapshots=3)
    pool = table.scheduler.index.pool.snapshots
    # another one that is on the host alone, and was used before
    older = pool.receive(Block(-1, 0, None))
    pool.received(older)
    pool.unhold(older)
    table.turn(table.request(2, A, 2))
    table.turn(table.looked_up())
    table.turn(table.fetched())
    first, last = [table.scheduler.index.get(table.keys(A)[number]).snapshot for number in (2, 5)]
    assert pool.num_host_free == 0
    assert pool.receive(Block(-1, 0, None)) is not None
    assert (first.block, older.on_host, last.on_host) == (None, True, True)


def test_a_prompt_that_ends_before_the_first_state_asks_nothing():
    table = recurrent(range(100, 113))
    assert [len(one.keys) for one in table.turn(table.request(1, range(100, 113), 1)).lookups] == [3]
    table = recurrent(range(100, 112))
    # its last token is to be computed: of its third block nothing can be had
    assert table.turn(table.request(1, range(100, 112), 1)).lookups == []


def test_kv_that_is_here_comes_again_for_the_sake_of_a_state_alone():
    table = recurrent(A)
    table.run(table.request(1, A, 1))
    index = table.scheduler.index
    for key in table.keys(A):
        snapshot = index.get(key).snapshot
        if snapshot is not None:
            index.pool.snapshots.drop(snapshot)
    (lookup,) = table.turn(table.request(2, A, 1)).lookups
    assert lookup.keys == (table.keys(A)[5],)
    before = index.get(lookup.keys[0])
    (fetch,) = table.turn(table.looked_up()).fetches
    assert (len(fetch.host), len(fetch.snapshots_host)) == (1, 1)
    table.turn(table.fetched())
    # the computation that was here gets the state
    assert index.get(lookup.keys[0]) is before
    assert before.snapshot.on_host
    (start,) = table.turn(table.copied()).step.starts
    assert start.num_cached == 24
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize("arrived", ["++-+++", "+++---", "+++++-", "------", "--++++"])
def test_a_fetch_that_brings_less_is_used_up_to_its_last_state(arrived):
    table = recurrent(A)
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.fetched(arrived=arrived))
    table.run()
    leading = len(arrived) - len(arrived.lstrip("+"))
    assert table.finished[1].cached_tokens[2] == leading // 3 * 12
    assert table.is_empty()


def test_a_late_fetch_gives_its_states_when_it_ends():
    table = recurrent(A)
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.fetched(arrived="+++---", late=True))
    (number,) = table.late
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 12)
    assert sum(one.holds for one in table.scheduler.index.pool.snapshots.live()) == 1
    table.turn(table.returned(number, "++++++"))
    assert sum(one.holds for one in table.scheduler.index.pool.snapshots.live()) == 0
    assert table.is_empty()


@pytest.mark.parametrize("places", [0, 1])
def test_as_many_states_as_there_is_room_for(places):
    table = recurrent(A, num_host_snapshots=max(places, 1))
    pool = table.scheduler.index.pool.snapshots
    if not places:
        # a transfer holds the only one
        pool.receive(Block(-1, -1, None))
        # the scheduler's own check does not know that transfer
        table.scheduler.check = lambda: None
    table.turn(table.request(1, A, 1))
    turned = table.turn(table.looked_up())
    assert [len(fetch.keys) for fetch in turned.fetches] == [3] * places
    # the host blocks behind the state are free again
    assert table.scheduler.index.pool.num_host_free == 64 - 3 * places


def test_what_came_for_a_request_is_not_evicted_before_it_is_admitted():
    table = recurrent(A, num_host_snapshots=2, max_running=1)
    table.turn(table.request(1, range(500, 503), 30))
    table.turn(table.request(2, A, 1))
    table.turn(table.looked_up())
    table.turn(table.fetched())
    pool = table.scheduler.index.pool.snapshots
    last = table.scheduler.index.get(table.keys(A)[5]).snapshot
    assert last.holds == 1

    others = [pool.receive(Block(-1, -1, None)) for _ in range(2)]
    # the other one made room, the one that the request waits for did not
    assert [one is None for one in others] == [False, True]
    pool.drop(others[0])
    pool.unhold(others[0])
    table.run()
    assert table.finished[2].cached_tokens == (0, 0, 24)
    assert table.is_empty()


def test_only_multiples_are_written_with_a_state_and_after_both_are_on_the_host():
    table = writing()
    keys = table.keys(A)
    written = puts(table, table.request(1, A, 1))
    assert written == {key: number in (2, 5) for number, key in enumerate(keys)}
    assert kept(table, A) == "x" * 8
    assert table.is_empty()


def test_a_decoded_block_is_written_with_the_state_at_its_end():
    table = writing()
    written = puts(table, table.request(1, range(100, 105), 20))
    assert list(written.values()) == [False, False, True] * 2
    assert table.is_empty()


def test_a_block_whose_state_found_no_place_is_not_written_and_neither_are_those_behind_it():
    table = writing(num_snapshots=1)
    # states of the step: the prompt's end is all that has a place
    written = puts(table, table.request(1, A, 1))
    pool = table.scheduler.index.pool.snapshots
    assert pool.refused > 0
    assert [written.get(key) for key in table.keys(A)] == [False, False, True, False, False, None, None, None]
    assert table.stats.dropped_writes == 3
    assert table.is_empty()


def test_a_state_that_is_lost_on_its_way_is_told():
    table = writing()
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.done())
    index = table.scheduler.index
    block = index.get(table.keys(A)[5])
    assert block.wanted
    # while the copies outward are in flight, its snapshot has to go
    snapshot = block.snapshot
    index.pool.snapshots.drop(snapshot)
    assert not block.wanted
    assert block.absent
    dropped = table.stats.dropped_writes
    assert dropped >= 1
    table.answer()
    assert kept(table, A) == "xxxxx..."
    assert table.is_empty()


def test_a_write_holds_the_state_until_it_has_ended():
    table = writing()
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.done())
    pool = table.scheduler.index.pool.snapshots
    while not table.puts:
        table.turn(*[table.copied() for _ in list(table.copies)])
    while table.copies:
        table.turn(*[table.copied() for _ in list(table.copies)])
    held = [one for one in pool.live() if one.holds]
    assert len(held) == 2
    for one in held:
        # the block goes, the place stays
        pool.drop(one)
        assert one in pool.live()
    table.answer()
    assert not [one for one in held if one in pool.live()]


def test_the_preempted_leave_their_states_to_the_store():
    table = writing(num_blocks=12, max_running=2, write_through="off")
    prompt = range(300, 317)
    written = puts(table, table.request(1, A[:17], 30), table.request(2, prompt, 30))
    assert table.stats.preemptions == 1
    # the newest was preempted; a state goes with the third block of a sequence
    assert kept(table, A[:17]) == "...."
    assert [written[key] for key in table.keys(prompt)] == [False, False, True, False]
    assert table.is_empty()


def test_the_next_turn_and_another_engine_go_on_from_what_was_written():
    table = writing()
    table.run(table.request(1, A, 9))
    other = recurrent()
    other.kept.update(table.kept)
    other.run(other.request(1, A, 9))
    assert other.finished[1].cached_tokens == (0, 0, 24)
    assert other.is_empty()
