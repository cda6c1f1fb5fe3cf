"""The scheduler: prefix hits, pending blocks and leaders (docs/design.md, section 4, rule 4)."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table


def cached(turned):
    return {start.key: start.num_cached for step in turned.steps for start in step.starts}


def blocks(turned):
    return {start.key: start.blocks for step in turned.steps for start in step.starts}


# -- hits


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)])
def test_a_hit_never_covers_the_last_token(length, hit):
    table = Table()
    table.run(table.request(1, range(13), 1))
    turned = table.turn(table.request(2, range(length), 1))
    assert cached(turned) == {2: hit}
    assert turned.chunks[0][:2] == (2, min(length - hit, 16))
    table.run()
    assert table.finished[2].cached_tokens == (hit, 0, 0)
    assert table.finished[2].num_rows == table.num_rows(2) == length


def test_a_hit_shares_the_blocks_and_takes_new_slots_for_the_rest_only():
    table = Table()
    (first,) = table.turn(table.request(1, range(10), 1)).step.starts
    table.turn(table.done())
    (second,) = table.turn(table.request(2, [*range(8), 99, 98], 1)).step.starts
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks[:2]
    assert len(second.slots) == 1


def test_only_the_same_tokens_behind_the_same_tokens_hit():
    table = Table()
    table.run(table.request(1, range(12), 1))
    assert cached(table.turn(table.request(2, [99, *range(1, 12)], 1))) == {2: 0}


def test_generated_blocks_serve_the_next_turn_of_a_conversation():
    table = Table()
    table.run(table.request(1, range(6), 8))
    said = table.finished[1].token_ids
    # 6 + 8 - 1 = 13 tokens were forwarded: 3 full blocks
    turned = table.turn(table.request(2, [*range(6), *said, 5, 6], 1))
    assert cached(turned) == {2: 12}


def test_without_prefix_cache_nothing_is_shared_or_kept():
    table = Table(prefix_cache=False)
    table.run(table.request(1, range(12), 3, block_keys=()))
    assert table.scheduler.stats().idle_blocks == 0
    turned = table.turn(table.request(2, range(12), 1, block_keys=()), table.request(3, range(12), 1, block_keys=()))
    assert cached(turned) == {2: 0, 3: 0}
    table.run()
    assert table.is_empty()


def test_what_a_hit_reads_is_not_evicted_for_its_own_rest():
    table = Table(num_blocks=4)
    table.run(table.request(1, range(9), 1))
    table.run(table.request(2, range(100, 105), 1))
    # idle: 2 blocks of the first, 1 of the second; one is free. The hit pins two, two fresh ones are needed.
    turned = table.turn(table.request(3, range(16), 1))
    assert cached(turned) == {3: 8}
    assert len(set(blocks(turned)[3])) == 4
    table.run()


def test_idle_hits_do_not_count_as_room():
    table = Table(num_blocks=4)
    table.run(table.request(1, range(9), 1))
    table.turn(table.request(2, range(50, 54), 9))
    # 2 idle, 1 used, 1 free; the third needs both idle ones pinned and two more
    turned = table.turn(table.done(), table.request(3, range(14), 1))
    assert turned.starts == []
    table.run()
    assert table.finished[3].reason == "length"


# -- pending blocks


def test_at_depth_2_the_next_step_shares_what_a_step_in_flight_fills():
    table = Table(pipeline_depth=2)
    turned = table.turn(table.request(1, range(9), 4), table.request(2, range(9), 4))
    first, second = turned.steps
    assert [start.key for start in first.starts] == [1]
    assert [(start.key, start.num_cached) for start in second.starts] == [(2, 8)]
    assert second.starts[0].blocks[:2] == first.starts[0].blocks[:2]


def test_at_depth_1_the_follower_reads_sealed_blocks():
    table = Table(pipeline_depth=1)
    assert table.turn(table.request(1, range(9), 4), table.request(2, range(9), 4)).starts == [1]
    assert cached(table.turn(table.done())) == {2: 8}


def test_rows_of_a_shared_pending_block_come_with_the_first_step_that_read_it():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(9), 1), table.request(2, range(9), 1))
    table.turn(table.done())
    assert table.num_rows(2) == 0
    assert table.finished[1].num_rows == 9
    table.turn(table.done())
    assert table.num_rows(2) == 9


def test_open_tails_are_never_shared():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(7), 4))
    turned = table.turn(table.request(2, range(7), 4), table.done())
    assert cached(turned) == {2: 4}
    assert len(blocks(turned)[2]) == 2


# -- leaders


def test_a_group_prefills_its_prompt_once():
    table = Table(max_step_tokens=8)
    group = [table.request(key, range(21), 2) for key in range(4)]
    assert table.turn(*group).starts == [0]
    assert table.turn(table.done()).starts == []
    turned = table.turn(table.done())
    # the last chunk of the leader, and nothing of the followers in the same step: block 4 is filled by it
    assert turned.chunks == [(0, 5, True)]
    turned = table.turn(table.done())
    assert cached(turned) == {1: 20, 2: 20, 3: 20}
    table.run()
    assert [table.finished[key].num_rows for key in range(4)] == [22] * 4


def test_a_follower_shares_up_to_its_own_fork_at_once():
    table = Table(max_step_tokens=8)
    assert table.turn(table.request(1, range(30), 2), table.request(2, [*range(4), 90, 91], 2)).starts == [1]
    # block 0 is sealed now; the leader still has 22 tokens to go, the budget is what is left
    table = Table(max_step_tokens=64)
    turned = table.turn(table.request(1, range(30), 2), table.request(2, [*range(4), 90, 91], 2))
    assert turned.starts == [1]
    assert cached(table.turn(table.done())) == {2: 4}


def test_unrelated_requests_pass_a_waiting_follower():
    table = Table()
    turned = table.turn(table.request(1, range(9), 4), table.request(2, range(9), 4), table.request(3, [50], 4))
    assert sorted(turned.starts) == [1, 3]


def test_a_follower_that_waits_holds_nothing():
    table = Table()
    table.turn(table.request(1, range(9), 4), table.request(2, range(9), 4))
    stats = table.scheduler.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (1, 1, 64 - 3)


def test_when_the_leader_is_aborted_the_next_in_line_leads():
    table = Table(max_step_tokens=8)
    group = [table.request(key, range(30), 2) for key in (1, 2, 3)]
    assert table.turn(*group).starts == [1]
    turned = table.turn(table.done(), table.abort(1))
    # two blocks are sealed; the second request computes the rest, the third follows it
    assert cached(turned) == {2: 8}
    assert turned.chunks == [(2, 8, False)]
    table.run()
    assert [table.finished[key].reason for key in (1, 2, 3)] == ["abort", "length", "length"]
    assert table.finished[3].cached_tokens == (28, 0, 0)


def test_when_the_leader_is_aborted_in_flight_its_step_still_seals_for_the_others():
    table = Table(max_step_tokens=8, pipeline_depth=2)
    turned = table.turn(table.request(1, range(30), 2), table.request(2, range(30), 2))
    assert turned.starts == [1]
    turned = table.turn(table.abort(1))
    assert turned.steps == []
    # blocks 0 to 3 are in flight for an ended request
    turned = table.turn(table.done())
    assert cached(turned) == {2: 16}
    table.run()
    assert table.finished[2].num_rows == table.num_rows(2) == 31


def test_when_the_leader_ends_by_deadline_the_next_in_line_leads():
    table = Table(max_step_tokens=8)
    table.turn(table.request(1, range(30), 2, deadline=5.0), table.request(2, range(30), 2))
    turned = table.turn(table.done(at=6.0))
    assert turned.finish.reason == "deadline"
    assert turned.starts == [2]


def test_when_the_leader_is_preempted_the_first_in_line_leads():
    # 1 decodes and takes the last block while 2 leads 3
    table = Table(num_blocks=8, max_step_tokens=5, decode_reserve_blocks=0)
    table.turn(table.request(1, range(100, 104), 12))
    turned = table.turn(table.done(), table.request(2, range(24), 2), table.request(3, range(24), 2))
    assert turned.starts == [2]
    while 2 not in turned.step.leaves:
        turned = table.turn(table.done())
        assert 3 not in turned.starts
    assert table.scheduler.stats().preemptions == 1
    table.run()
    assert [table.finished[key].reason for key in (1, 2, 3)] == ["length"] * 3
    assert [table.num_rows(key) for key in (2, 3)] == [25, 25]


def test_two_computations_of_one_block_do_not_meet_in_the_index():
    # the prompt of 2 ends with the block that 1 is computing: its last token must be forwarded anyway
    table = Table()
    turned = table.turn(table.request(1, range(9), 2), table.request(2, range(4), 2))
    assert turned.starts == [1, 2]
    table.run()
    stats = table.scheduler.stats()
    # one computation of block 0 and one of block 1 are kept
    assert stats.idle_blocks == 2
    assert table.is_empty()
