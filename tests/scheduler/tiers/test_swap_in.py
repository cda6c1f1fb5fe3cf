"""The scheduler with a host tier: swap-in, hits that arrive, who waits for which copy (docs/design.md,
section 4, rules 7, 8)."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table
from tests.scheduler.tiers.scenes import leave_on_host

A, B = range(9), range(100, 109)


# -- in


def test_what_comes_in_has_its_device_blocks_and_all_others_from_the_same_turn_on():
    table = Table(num_blocks=4, num_host_blocks=8)
    (first,) = table.turn(table.request(900, A, 1)).step.starts
    slots = dict(zip(first.blocks, zip(first.slots, first.generations, strict=True), strict=True))
    table.run()
    leave_on_host(table)
    assert table.places(A) == ["host", "host"]
    turned = table.turn(table.request(1, [*range(8), 20, 21, 22, 23], 1))
    (into,) = turned.ins
    assert len(set(into.device)) == 2
    # their rows are where they were
    assert list(zip(into.slots, into.generations, strict=True)) == [slots[block] for block in first.blocks[:2]]
    assert turned.steps == []
    # three blocks are taken: nobody else can have them
    assert (table.stats.free_blocks + table.stats.idle_blocks, table.stats.running, table.stats.waiting) == (1, 1, 0)
    turned = table.turn(table.copied())
    (start,) = turned.step.starts
    assert (start.num_cached, start.blocks[:2]) == (8, into.device)
    assert len(start.slots) == 1
    table.run()
    end = table.finished[1]
    assert (end.cached_tokens, end.num_rows) == ((0, 8, 0), 12)
    assert (table.stats.hit_tokens, table.stats.hit_tokens_host, table.stats.swapped_in_blocks) == (8, 8, 2)
    assert table.places(A) == ["both", "both"]
    assert table.is_empty()


def test_hits_of_both_tiers_are_told_apart():
    table = Table(num_blocks=6, num_host_blocks=8)
    leave_on_host(table, A)
    table.run(table.request(1, range(5), 1))
    assert table.places(A) == ["both", "host"]
    (into,) = table.turn(table.request(2, A, 1)).ins
    assert len(into.host) == 1
    table.run()
    assert table.finished[2].cached_tokens == (4, 4, 0)
    assert (table.stats.hit_tokens, table.stats.hit_tokens_host) == (12, 8)
    assert table.is_empty()


def test_a_sequence_without_room_for_its_host_blocks_waits_and_holds_nothing():
    table = Table(num_blocks=4, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, range(50, 54), 5))
    for _ in range(2):
        turned = table.turn(table.done(), table.request(2 + len(table.decoding) * 10 + _, A, 1))
        assert turned.ins == []
    assert table.stats.waiting == 2
    assert table.stats.free_blocks + table.stats.idle_blocks == 2
    table.run()
    assert table.is_empty()


def test_others_go_on_while_blocks_arrive():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, range(50, 54), 4))
    turned = table.turn(table.done(), table.request(2, A, 1))
    assert len(turned.ins) == 1
    assert turned.starts == []
    assert len(turned.steps) == 1
    assert table.turn(table.done(), table.request(3, [7, 8], 2)).starts == [3]
    while table.flying:
        table.turn(table.done())
    assert sorted(set(table.finished) - {900, 999}) == [1, 3]
    assert table.turn(table.copied()).cached == {2: 8}
    table.run()
    assert table.is_empty()


def test_two_requests_share_one_copy():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    turned = table.turn(table.request(1, A, 1))
    assert len(turned.ins) == 1
    turned = table.turn(table.request(2, [*range(8), 77], 1), table.request(3, [*range(4), 88], 1))
    assert turned.ins == []
    assert table.stats.running == 3
    turned = table.turn(table.copied())
    assert turned.cached == {1: 8, 2: 8, 3: 4}
    starts = {start.key: start for start in turned.step.starts}
    assert starts[1].blocks[:2] == starts[2].blocks[:2]
    assert starts[1].blocks[0] == starts[3].blocks[0]
    table.run()
    # only the first sent for them: the others found them with a place on the device
    assert [table.finished[key].cached_tokens for key in (1, 2, 3)] == [(0, 8, 0), (8, 0, 0), (4, 0, 0)]
    assert table.is_empty()


def test_a_sequence_that_waits_for_two_copies_starts_with_the_last():
    table = Table(num_blocks=12, num_host_blocks=12)
    leave_on_host(table, range(17))
    table.turn(table.request(1, range(9), 1))
    turned = table.turn(table.request(2, range(17), 1))
    assert [len(into.host) for into in turned.ins] == [2]
    assert table.turn(table.copied(max(table.copies))).starts == []
    turned = table.turn(table.copied())
    assert turned.cached == {1: 8, 2: 16}
    table.run()
    assert table.is_empty()


def test_long_hits_come_in_several_copies():
    table = Table(num_blocks=80, num_host_blocks=160, max_step_tokens=400)
    leave_on_host(table, range(70 * 4 + 1))
    turned = table.turn(table.request(1, range(70 * 4 + 1), 1))
    assert [len(into.host) for into in turned.ins] == [64, 6]
    assert table.turn(table.copied()).starts == []
    assert table.turn(table.copied()).cached == {1: 280}
    table.run()


def test_abort_while_blocks_arrive():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 4))
    turned = table.turn(table.abort(1))
    assert (turned.finish.reason, turned.finish.token_ids, turned.finish.num_rows) == ("abort", (), 0)
    # nothing was taken from the cache for it
    assert turned.finish.cached_tokens == (0, 0, 0)
    assert turned.steps == []
    # the copy goes on, and nobody gets its blocks
    stats = table.stats
    assert stats.free_blocks + stats.idle_blocks == 6
    turned = table.turn(table.request(2, [*range(8), 5], 1))
    assert (turned.ins, turned.starts) == ([], [])
    turned = table.turn(table.copied())
    assert turned.cached == {2: 8}
    table.run()
    assert table.is_empty()


def test_a_deadline_while_blocks_arrive():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 4, deadline=5.0))
    assert table.turn(table.timer(5.0)).finish.reason == "deadline"
    table.turn(table.copied())
    assert table.is_empty()
    assert table.places(A) == ["both", "both"]


def test_one_of_two_is_aborted_and_the_other_gets_what_arrives():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 1), table.request(2, A, 1))
    table.turn(table.abort(1))
    assert table.turn(table.copied()).cached == {2: 8}
    table.run()
    assert table.is_empty()


def test_a_sequence_that_is_preempted_while_blocks_arrive_is_matched_again():
    table = Table(num_blocks=6, num_host_blocks=16, decode_reserve_blocks=0)
    leave_on_host(table, A)
    table.turn(table.request(1, range(50, 60), 12))
    assert len(table.turn(table.done(), table.request(2, A, 1)).ins) == 1
    while not table.stats.preemptions:
        table.turn(table.done())
    # the runner has never heard of it
    assert all(2 not in step.leaves for step in table.flying)
    assert table.stats.waiting == 1
    table.run()
    assert table.stats.preemptions == 1
    assert [table.finished[key].num_rows for key in (1, 2)] == [21, 9]
    assert table.finished[2].cached_tokens[2] == 0
    assert sum(table.finished[2].cached_tokens) == 8
    assert table.is_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_was_loading_takes_over_what_a_leader_computed_meanwhile(depth):
    table = Table(num_blocks=24, num_host_blocks=16, pipeline_depth=depth, max_step_tokens=64)
    leave_on_host(table, A)
    prompt = range(25)
    turned = table.turn(table.request(1, prompt, 1), table.request(2, prompt, 1))
    assert (len(turned.ins), turned.starts) == (1, [])
    turned = table.turn(table.copied())
    # both have arrived: the first computes what follows, the other one reads it
    assert turned.cached == ({1: 8} if depth == 1 else {1: 8, 2: 24})
    if depth == 1:
        turned = table.turn(table.done())
        assert turned.cached == {2: 24}
    first = turned.steps[-1].starts[-1]
    assert len(first.slots) == 1
    table.run()
    assert table.finished[2].num_rows == 25
    # what others computed was not computed for it either
    assert table.finished[2].cached_tokens == (24, 0, 0)
    assert table.is_empty()


def test_a_sequence_that_was_loading_waits_for_the_leader_of_its_next_block():
    table = Table(num_blocks=24, num_host_blocks=16, max_step_tokens=8)
    leave_on_host(table, A)
    table.turn(table.request(1, range(25), 1), table.request(2, range(25), 1))
    cached = [table.turn(table.copied()).cached]
    while table.flying:
        cached.append(table.turn(table.done()).cached)
    # chunks of 8: the leader's later blocks are pending in later steps; nobody computes a block twice
    assert [entry for entry in cached if entry] == [{1: 8}, {2: 24}]
    assert table.is_empty()


def test_without_capture_copies_name_no_slots():
    table = Table(num_blocks=4, num_host_blocks=8, capture=False)
    leave_on_host(table, A, start=-1)
    (into,) = table.turn(table.request(3, A, 1, start=-1)).ins
    assert (into.slots, into.generations) == ((), ())
    table.run()
    assert table.finished[3].cached_tokens == (0, 8, 0)
    assert table.is_empty()


def test_a_copy_that_nobody_started_is_a_defect():
    from fdasync.errors import InvariantBroken
    from fdasync.events.catalog import SwapDone

    table = Table(num_blocks=4, num_host_blocks=8)
    with pytest.raises(InvariantBroken, match="copy 3 ended, and was not in flight"):
        table.turn(SwapDone(copy_id=3, seconds=0.0, kv_nbytes=0, aux_nbytes=0, at=1.0))
