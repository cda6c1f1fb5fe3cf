"""The scheduler with a host tier: swap-out, swap-in, who waits for which copy (DESIGN 4, DECISIONS 7, 8)."""

from __future__ import annotations

import pytest

from tests.helpers import Table

A, B = range(9), range(100, 109)


def leave_on_host(table, *prompts, **fields):
    """Compute these prompts, and leave their full blocks on the host only."""
    for prompt in prompts:
        table.run(table.request(900 + len(table.finished), prompt, 1, **fields))
    index = table.scheduler.index
    for block in index.pool.live():
        table.scheduler.copier.keep(block)
    table.turn()
    table.answer()
    for block in list(index._clean):
        index._leave_device(block)
    for prompt in prompts:
        assert set(table.places(prompt)) == {"host"}


# -- out


def test_under_pressure_blocks_go_out_before_they_are_evicted():
    table = Table(num_blocks=4, num_host_blocks=8)
    (first,) = table.turn(table.request(1, A, 1)).step.starts
    table.turn(table.done())
    assert table.places(A) == ["device", "device"]
    turned = table.turn(table.request(2, range(50, 63), 1))
    (out,) = turned.outs
    # the last block of a chain goes first
    assert out.device == (first.blocks[1], first.blocks[0])
    assert len(set(out.host)) == 2
    assert turned.steps == []
    assert table.stats.evictions == 0
    assert table.turn(table.copied()).starts == [2]
    assert table.places(A) == ["host", "host"]
    table.run()
    assert (table.stats.swapped_out_blocks, table.stats.evictions, table.stats.host_evictions) == (2, 2, 0)
    assert table.is_empty()


def test_nothing_goes_out_while_there_is_room():
    table = Table(num_blocks=8, num_host_blocks=8)
    table.run(table.request(1, A, 1))
    assert table.turn(table.request(2, range(50, 63), 1)).outs == []


def test_a_big_device_copies_idle_blocks_ahead_of_need():
    table = Table(num_blocks=32, num_host_blocks=32, max_step_tokens=200)
    # a sixteenth of the blocks shall be had at once
    turned = table.turn(table.request(1, range(31 * 4 + 1), 1))
    assert turned.outs == []
    turned = table.turn(table.done())
    assert [len(out.device) for out in turned.outs] == [1]
    table.run()
    assert table.stats.swapped_out_blocks == 1


def test_no_more_goes_out_than_somebody_lacks():
    table = Table(num_blocks=6, num_host_blocks=8)
    table.run(table.request(1, range(21), 1))
    (out,) = table.turn(table.request(2, B, 1)).outs
    # 1 is free, 5 idle, 3 needed
    assert len(out.device) == 2


def test_a_device_block_comes_back_with_its_copy_and_waits_for_no_write_to_the_store():
    table = Table(num_blocks=4, num_host_blocks=8, store=True, prefill_tokens_per_s=1e9)
    table.turn(table.request(1, A, 1))
    (out,) = table.turn(table.done()).outs
    assert table.turn(table.request(2, range(50, 63), 1)).starts == []
    turned = table.turn(table.copied())
    (put,) = turned.puts
    assert put.host == out.host
    # the write is under way, and the request has the blocks
    assert turned.starts == [2]
    assert table.stats.free_host_blocks == 6
    table.run()
    assert table.is_empty()


def test_who_needs_less_does_not_wait_for_a_copy_that_others_need():
    table = Table(num_blocks=6, num_host_blocks=8)
    table.run(table.request(1, A, 1))
    assert len(table.turn(table.request(2, range(50, 70), 1, priority=-1)).outs) == 1
    # four blocks are free, five are lacking; the newcomer is served first
    assert table.turn(table.request(3, [7], 1)).starts == [3]
    table.run()
    assert [table.finished[key].reason for key in (2, 3)] == ["length", "length"]


def test_what_finds_no_room_on_the_host_is_dropped():
    table = Table(num_blocks=4, num_host_blocks=1)
    table.run(table.request(1, A, 1))
    (out,) = table.turn(table.request(2, range(50, 66), 1)).outs
    assert len(out.host) == 1
    assert table.turn(table.copied()).starts == [2]
    assert sorted(table.places(A)) == ["", "host"]
    assert (table.stats.evictions, table.stats.swapped_out_blocks) == (2, 1)
    table.run()
    assert table.is_empty()


def test_the_host_gives_up_what_is_nowhere_else_and_was_used_longest_ago():
    table = Table(num_blocks=4, num_host_blocks=4)
    leave_on_host(table, A, B)
    table.run(table.request(1, range(200, 209), 1))
    table.run(table.request(2, range(300, 313), 1))
    assert table.stats.host_evictions >= 2
    assert table.places(A) == ["", ""]


def test_while_a_block_is_on_its_way_out_it_can_be_hit_and_stays_where_it_is():
    table = Table(num_blocks=4, num_host_blocks=8)
    (first,) = table.turn(table.request(1, A, 1)).step.starts
    table.turn(table.done())
    table.turn(table.request(2, range(50, 63), 1))
    table.turn(table.abort(2))
    turned = table.turn(table.request(3, A, 1))
    assert turned.cached == {3: 8}
    assert turned.step.starts[0].blocks[:2] == first.blocks[:2]
    table.turn(table.copied())
    assert table.places(A) == ["both", "both"]
    table.run()
    assert table.is_empty()


def test_a_decode_that_needs_a_block_waits_for_a_copy_rather_than_preempt():
    table = Table(num_blocks=5, num_host_blocks=8, decode_reserve_blocks=0)
    table.run(table.request(1, A, 1))
    turned = table.turn(table.request(2, range(50, 54), 5), table.request(3, range(60, 64), 5))
    assert turned.starts == [2, 3]
    # one block is free, two are idle: the second of them has to go out first
    turned = table.turn(table.done())
    assert [append.key for append in turned.step.appends] == [2]
    assert turned.step.skips == (3,)
    assert len(turned.outs) == 1
    turned = table.turn(table.copied(), table.done())
    assert [append.key for append in turned.step.appends] == [3]
    table.run()
    assert table.stats.preemptions == 0
    assert [len(table.finished[key].token_ids) for key in (2, 3)] == [5, 5]


def test_nobody_waits_for_copies_when_all_that_runs_is_short():
    table = Table(num_blocks=4, num_host_blocks=8, decode_reserve_blocks=0)
    table.run(table.request(1, A, 1))
    table.turn(table.request(2, range(50, 58), 4))
    turned = table.turn(table.done())
    # nothing to compute until the copy is done
    assert turned.steps == []
    assert len(turned.outs) == 1
    turned = table.turn(table.copied())
    assert [append.key for append in turned.step.appends] == [2]
    table.run()
    assert table.finished[2].num_rows == 11


def test_who_sits_out_takes_what_a_later_victim_of_the_same_plan_gave():
    """Three want a second block at once: the first waits for a copy of what the last one gave, and then the second,
    preempted by its own need, gives a block that was its own: nothing else happens that would wake the first."""
    table = Table(num_blocks=3, num_host_blocks=4, decode_reserve_blocks=0, write_back=False)
    twins = [table.request(key, range(4), 8) for key in (1, 2)]
    table.turn(*twins, table.request(3, range(50, 54), 8))
    table.turn(table.done())
    assert table.flying or table.copies
    table.run()
    assert [len(table.finished[key].token_ids) for key in (1, 2, 3)] == [8, 8, 8]
    assert table.is_empty()


def test_blocks_are_not_queued_again_and_again_while_copies_hang():
    table = Table(num_blocks=32, num_host_blocks=64, max_running=4, max_step_tokens=64)
    for key in range(5):
        table.turn(table.request(key, range(key * 100, key * 100 + 5), 1))
        table.turn(table.done())
        for block in table.scheduler.index.pool.live():
            table.scheduler.copier.keep(block)
        table.turn()
    assert len(table.copies) == 4
    table.turn(table.request(9, range(1000, 1110), 1))
    for _ in range(50):
        table.turn(table.timer(1.0))
    assert table.stats.writing <= table.stats.idle_blocks + 4
    table.run()
    assert table.is_empty()


def hang(table, count=4):
    """As many copies outward as may be in flight, of blocks that are in use nowhere."""
    for key in range(count):
        table.turn(table.request(800 + key, range(8000 + key * 10, 8005 + key * 10), 1))
        table.turn(table.done())
        for block in table.scheduler.index.pool.live():
            table.scheduler.copier.keep(block)
        table.turn()
    assert len(table.copies) == count


def test_what_is_needed_now_goes_out_before_what_shall_only_be_kept():
    table = Table(num_blocks=14, num_host_blocks=64)
    hang(table)
    (kept,) = table.turn(table.request(1, range(50, 55), 9)).step.starts
    table.turn(table.done())
    table.scheduler.copier.keep(table.scheduler._sequences[1].blocks[0])
    (idle,) = table.turn(table.request(2, A, 1), table.done()).step.starts
    table.turn(table.done())
    table.turn(table.request(3, range(300, 325), 1))
    (out,) = table.turn(table.copied()).outs
    assert out.device[-1] == kept.blocks[0]
    assert set(out.device[:-1]) <= set(idle.blocks)
    table.run()
    assert table.is_empty()


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


def test_who_has_no_room_for_what_would_come_in_waits_and_holds_nothing():
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


def test_who_waits_for_two_copies_starts_with_the_last():
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


def test_who_is_preempted_while_blocks_arrive_is_matched_again():
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
def test_who_was_loading_takes_over_what_a_leader_computed_meanwhile(depth):
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


def test_who_was_loading_waits_for_the_leader_of_its_next_block():
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


# -- everything full


def churn(table, prompts, max_tokens, answers):
    """Requests for these prompts, again and again; `answers`: when copies and writes end."""
    key = 0
    for _ in range(3):
        for prompt in prompts:
            key += 1
            table.turn(table.request(key, prompt, max_tokens))
    for _ in range(4000):
        if len(table.finished) == key:
            break
        events = [table.done()] if table.flying else []
        if answers == "at once" or not events:
            puts = dict(table.puts)
            if answers == "writes hang":
                table.puts.clear()
            events += table.answers()
            if answers == "writes hang":
                table.puts.update(puts)
        elif answers == "newest first" and table.copies:
            events.append(table.copied(max(table.copies)))
        table.turn(*events)
    assert len(table.finished) == key, f"{key - len(table.finished)} of {key} requests wait for ever"
    table.run()
    assert table.is_empty()
    assert all(end.reason == "length" for end in table.finished.values())


@pytest.mark.parametrize("answers", ["at once", "late", "newest first", "writes hang"])
@pytest.mark.parametrize(
    ("num_blocks", "num_host", "depth", "max_running", "reserve", "store"),
    [
        (4, 1, 1, 4, 0, False),  # the host holds one block
        (4, 1, 2, 4, 1, True),
        (4, 4, 1, 4, 0, True),  # as big as the device
        (5, 3, 2, 8, 1, True),
        (6, 2, 2, 2, 2, True),
        (8, 40, 2, 8, 0, True),  # much bigger
        (8, 8, 1, 1, 0, True),  # one at a time
        (9, 2, 2, 8, 3, False),
    ],
)
def test_match_and_reserve_cannot_deadlock_with_every_tier_full(
    num_blocks, num_host, depth, max_running, reserve, store, answers
):
    table = Table(
        num_blocks=num_blocks, num_host_blocks=num_host, pipeline_depth=depth, max_running=max_running,
        decode_reserve_blocks=reserve, store=store, prefill_tokens_per_s=10.0,
    )  # fmt: skip
    shared = list(range(8))
    # each fills the device to the last block; several share a beginning
    size = num_blocks * 4
    prompts = [
        [*shared, *range(100, 100 + size - 8 - 3)],
        range(200, 200 + size - 3),
        [*shared, *range(300, 303)],
        [*range(200, 206), 7],
        [*range(400, 409)],
        [*shared, *range(100, 104), 9],
    ]
    churn(table, prompts, 4, answers)
    assert table.stats.swapped_out_blocks > 0
