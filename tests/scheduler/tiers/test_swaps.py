"""The scheduler with a host tier: swap-out, swap-in, who waits for which copy (docs/design.md,
section 4, rules 7, 8)."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table
from tests.scheduler.tiers.scenes import hang, leave_on_host

A, B = range(9), range(100, 109)


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


def test_a_sequence_that_needs_less_does_not_wait_for_a_copy_that_others_need():
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


def test_no_sequence_waits_for_copies_when_all_that_run_are_short():
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


def test_a_sequence_that_sits_out_takes_what_a_later_victim_of_the_same_plan_gave():
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
            table.scheduler.swap_planner.keep(block)
        table.turn()
    assert len(table.copies) == 4
    table.turn(table.request(9, range(1000, 1110), 1))
    for _ in range(50):
        table.turn(table.timer(1.0))
    assert table.stats.writing <= table.stats.idle_blocks + 4
    table.run()
    assert table.is_empty()


def test_what_is_needed_now_goes_out_before_what_shall_only_be_kept():
    table = Table(num_blocks=14, num_host_blocks=64)
    hang(table)
    (kept,) = table.turn(table.request(1, range(50, 55), 9)).step.starts
    table.turn(table.done())
    table.scheduler.swap_planner.keep(table.scheduler.sequences[1].blocks[0])
    (idle,) = table.turn(table.request(2, A, 1), table.done()).step.starts
    table.turn(table.done())
    table.turn(table.request(3, range(300, 325), 1))
    (out,) = table.turn(table.copied()).outs
    assert out.device[-1] == kept.blocks[0]
    assert set(out.device[:-1]) <= set(idle.blocks)
    table.run()
    assert table.is_empty()


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


@pytest.mark.ci(after=12)
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
