"""The scheduler with a store behind the host: writes, and the order of eviction (docs/design.md, section 7)."""

from __future__ import annotations

import pytest

from tests.scheduler.tiers.scenes import fetch_id, go_on, make_table

A = range(13)  # three full blocks that a hit may cover


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
    assert table.stats.late_transfers == 1
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
    table.scheduler.swap_planner.keep(block)
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
    assert (table.stats.written_blocks, table.stats.late_transfers) == (3, 1)
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
    assert len(table.scheduler.store_planner._queue) <= 17
    table.run()
    assert table.is_empty()
