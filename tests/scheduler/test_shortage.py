"""The scheduler with too few blocks: preemption, and blocks that steps in flight still name (docs/design.md,
section 5)."""

from __future__ import annotations

import pytest

from fdasync.errors import InvariantBroken
from tests.scheduler.table import Table

EOS = 7


def preempted(turned):
    """Keys that leave without having ended: with these requests nobody else leaves."""
    return [key for step in turned.steps for key in step.leaves]


def fill(table, *requests):
    """Admit them all in the first step; they arrive in the order given."""
    turned = table.turn(*requests)
    assert turned.starts == [request.key for request in sorted(requests, key=lambda one: -one.priority)]
    return turned


def crowd(table, priorities, max_tokens=12):
    """One request of one full block for each priority, oldest first: each of them wants a second block at once."""
    return fill(
        table,
        *(
            table.request(key, range(key * 10, key * 10 + 4), max_tokens, priority=priority)
            for key, priority in enumerate(priorities)
        ),
    )


@pytest.mark.parametrize(
    ("priorities", "victims"),
    [
        ([0, 0, 0, 0], [3, 2]),  # newest first
        ([0, 5, 5, 5], [0, 3]),  # lowest priority before age, though it is the oldest
        ([5, 0, 5, 9], [1, 2]),  # the newest is the highest: an older one of the lowest goes
        ([1, 0, 1, 0], [3, 1]),
        ([0, 0, 0, 9], [2, 1]),  # never the oldest of the highest
    ],
)
def test_the_lowest_priority_goes_first_then_the_newest(priorities, victims):
    table = Table(num_blocks=4, decode_reserve_blocks=0)
    crowd(table, priorities)
    turned = table.turn(table.done())
    # two victims free the blocks that the other two need
    assert preempted(turned) == victims
    assert len(turned.step.appends) == 2
    assert table.scheduler.stats().preemptions == 2
    table.run()
    assert sorted(table.finished) == [0, 1, 2, 3]
    assert all(len(end.token_ids) == 12 for end in table.finished.values())


def test_the_oldest_of_the_highest_gets_through_whatever_comes():
    table = Table(num_blocks=4, decode_reserve_blocks=0)
    fill(table, table.request(1, range(4), 12, priority=1))
    table.turn(table.done(), *(table.request(key, [key], 8) for key in range(2, 30)))
    order = []
    while table.flying:
        turned = table.turn(table.done())
        # whoever is preempted starts again
        assert 1 not in turned.starts
        order += [end.key for end in turned.finishes]
    assert sorted(order) == list(range(1, 30))
    assert table.finished[1].num_rows == 4 + 12 - 1


def test_at_depth_2_the_needy_waits_for_the_blocks_of_the_victim():
    table = Table(num_blocks=3, pipeline_depth=2, decode_reserve_blocks=0)
    # three blocks: each has one, the third is taken at the first need
    fill_steps = table.turn(table.request(1, range(4), 9), table.request(2, range(50, 54), 9)).steps
    assert len(fill_steps) == 2
    stats = table.scheduler.stats()
    assert stats.preemptions == 1
    # the first got the free block; the second was preempted by its own need, and leaves with this step
    assert fill_steps[1].leaves == (2,)
    assert [append.key for append in fill_steps[1].appends] == [1]
    table.run()
    assert [len(table.finished[key].token_ids) for key in (1, 2)] == [9, 9]


def test_a_victim_asks_for_nothing_any_more():
    # both want a second block in the same plan; the first takes the place of the other
    table = Table(num_blocks=2, pipeline_depth=2, prefix_cache=False, decode_reserve_blocks=0)
    turned = fill(table, table.request(1, range(4), 5), table.request(2, range(50, 54), 5))
    assert len(turned.steps) == 1
    assert table.scheduler.stats().preemptions == 1
    turned = table.turn(table.done())
    assert [append.key for step in turned.steps for append in step.appends] == [1]
    table.run()
    assert [table.finished[key].num_rows for key in (1, 2)] == [8, 8]


def test_no_sequence_is_preempted_twice_for_one_need():
    table = Table(num_blocks=6, pipeline_depth=2, decode_reserve_blocks=0)
    # 1 will need a block at position 4, when all six are taken
    steps = table.turn(
        table.request(1, range(3), 9), table.request(2, range(20, 26), 12), table.request(3, range(30, 40), 12)
    ).steps
    assert [len(step.skips) for step in steps] == [0, 0]
    turned = table.turn(table.done())
    assert preempted(turned) == [3]
    # its three blocks are on their way out: 1 sits out until the steps that name them are done
    assert turned.step.skips == (1,)
    turned = table.turn(table.done())
    assert preempted(turned) == []
    assert table.scheduler.stats().preemptions == 1
    while 1 in turned.step.skips:
        turned = table.turn(table.done())
    assert [append.key for append in turned.step.appends if append.key == 1] == [1]
    table.run()
    assert [end.num_rows for _, end in sorted(table.finished.items())] == [11, 17, 21]


def test_blocks_that_others_share_do_not_come_free_with_a_victim():
    table = Table(num_blocks=5, pipeline_depth=2, decode_reserve_blocks=0)
    shared = [90, 91, 92, 93]
    # 1 computes the first block, the others read it; 1 and 2 both need a third block in the third step
    tails = {1: range(3), 2: range(10, 14), 3: [20], 4: [30]}
    turned = table.turn(*(table.request(key, [*shared, *tail], 9) for key, tail in tails.items()))
    assert [start.num_cached for step in turned.steps for start in step.starts] == [0, 4, 4, 4]
    assert table.turn(table.done()).steps == []
    # each victim holds two blocks, of which the first is of all four: one comes back from each
    assert table.scheduler.stats().preemptions == 2
    turned = table.turn(table.done())
    assert preempted(turned) == [4, 3]
    assert sorted(append.key for append in turned.steps[0].appends) == [1, 2]
    table.run()
    assert [len(table.finished[key].token_ids) for key in tails] == [9] * 4


def test_a_sequence_that_its_own_need_preempted_needs_nothing_any_more():
    table = Table(num_blocks=3, pipeline_depth=2, decode_reserve_blocks=0)
    table.turn(table.request(1, [1, 2], 9))
    newer = [table.request(2, [10], 9, priority=1), table.request(3, range(20, 24), 9, priority=2)]
    assert table.turn(table.done(), *newer).starts == [3, 2]
    # 1 and 3 need a second block, and 1 is asked first: it gives its own one, which is what 3 waits for
    turned = table.turn(table.done())
    assert preempted(turned) == [1]
    assert turned.step.skips == (3,)
    assert table.scheduler.stats().preemptions == 1
    table.run()
    assert [len(table.finished[key].token_ids) for key in (1, 2, 3)] == [9, 9, 9]


def test_a_sequence_that_sits_out_neither_computes_nor_samples_and_misses_no_token():
    table = Table(num_blocks=6, pipeline_depth=2, decode_reserve_blocks=0)
    table.turn(table.request(1, range(3), 9), table.request(2, range(20, 26), 12), table.request(3, range(30, 40), 12))
    table.turn(table.done())
    counts = {1: 0, 2: 0, 3: 0}
    table.run()
    for key in counts:
        assert len(table.finished[key].token_ids) == len(set(table.finished[key].token_ids))
    assert [len(table.finished[key].token_ids) for key in (1, 2, 3)] == [9, 12, 12]


def test_the_preempted_come_back_with_tokens_and_rows_and_get_new_slots():
    table = Table(num_blocks=4, prefix_cache=False, decode_reserve_blocks=0)
    first = crowd(table, [0, 0, 0, 0])
    before = {start.key: start for start in first.step.starts}
    rows_then = {}
    back = {}
    turned = table.turn(table.done(100, 101, 102, 103))
    rows_then |= {key: table.num_rows(key) for key in (2, 3)}
    while len(back) < 2:
        turned = table.turn(table.done())
        back |= {start.key: start for step in turned.steps for start in step.starts}
    # the first pass over their prompts is theirs already
    assert rows_then == {2: 4, 3: 4}
    for key in (2, 3):
        start = back[key]
        assert len(start.tokens) // 4 == 5
        assert start.tokens[:16] == before[key].tokens
        assert int.from_bytes(start.tokens[16:20], "little") == 100 + key
        assert start.num_cached == 0
        old = set(zip(before[key].slots, before[key].generations, strict=True))
        assert not old & set(zip(start.slots, start.generations, strict=True))
    table.run()
    for key in range(4):
        assert table.finished[key].num_rows == table.num_rows(key) == 15
        # no position came twice, though two of them were computed twice
        assert sum(count for _, count in table.rows[key]) == 15


def test_a_victim_recomputes_only_what_was_evicted():
    table = Table(num_blocks=6, decode_reserve_blocks=0)
    turned = fill(table, table.request(1, range(8), 9), table.request(2, range(50, 58), 9))
    while preempted(turned) != [2]:
        turned = table.turn(table.done())
    assert 1 not in table.finished
    starts = []
    while table.flying:
        starts += [start for step in table.turn(table.done()).steps for start in step.starts]
    (start,) = starts
    assert start.key == 2
    # its three sealed blocks went idle, and the other one needed a block: the leaf was evicted
    assert start.num_cached == 8
    assert table.finished[2].cached_tokens == (0, 0, 0)
    assert table.finished[2].num_rows == 16


def test_a_prefill_may_be_preempted_between_chunks():
    table = Table(num_blocks=8, max_step_tokens=5, decode_reserve_blocks=0)
    table.turn(table.request(1, range(100, 104), 16))
    turned = table.turn(table.done(), table.request(2, range(24), 4))
    seen = []
    while table.flying:
        seen += preempted(turned)
        turned = table.turn(table.done())
    assert seen[0] == 2
    assert [table.finished[key].num_rows for key in (1, 2)] == [19, 27]
    assert table.num_rows(2) == 27


@pytest.mark.parametrize("how", ["abort", "deadline", "stop id", "match"])
def test_whatever_ends_a_preempted_one_before_its_steps_are_done(how):
    table = Table(num_blocks=3, pipeline_depth=2, decode_reserve_blocks=0)
    table.turn(
        table.request(1, range(4), 9),
        table.request(2, range(50, 54), 9, stop_ids=frozenset({EOS}), emits=how == "match", deadline=8.0,
                      checks_stops=how == "match"),
    )  # fmt: skip
    assert table.scheduler.stats().preemptions == 1
    # 2 was preempted while its prefill is in flight
    if how == "abort":
        end = table.turn(table.abort(2)).finish
        assert (end.token_ids, end.num_rows) == ((), 0)
    elif how == "deadline":
        end = table.turn(table.timer(8.0)).finish
        assert (end.token_ids, end.num_rows) == ((), 0)
    elif how == "stop id":
        end = table.turn(table.done(60, EOS)).finish
        assert (end.reason, end.token_ids, end.num_rows) == ("stop", (EOS,), 4)
    else:
        turned = table.turn(table.done(60, EOS))
        assert turned.emitted == [(2, EOS)]
        assert turned.finishes == []
        end = table.turn(table.checked(2, 1)).finish
        assert (end.reason, end.token_ids, end.num_rows) == ("stop", (EOS,), 4)
    assert end.key == 2
    table.run()
    assert list(table.finished) == [2, 1]
    assert table.is_empty()


def test_abort_while_preempted_and_waiting_keeps_tokens_and_rows():
    table = Table(num_blocks=4, decode_reserve_blocks=0)
    crowd(table, [0, 0, 0, 0])
    table.turn(table.done(100, 101, 102, 103))
    end = table.turn(table.abort(3)).finish
    assert (end.token_ids, end.num_rows) == ((103,), 4)
    assert table.num_rows(3) == 4
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_blocks_are_not_given_out_while_a_step_in_flight_names_them(end):
    table = Table(num_blocks=3, pipeline_depth=2, prefix_cache=False, decode_reserve_blocks=0)
    stop = {"stop_ids": frozenset({EOS})}
    first = table.turn(table.request(1, range(6), 4, **stop))
    named = set(first.steps[0].starts[0].blocks)
    if end == "abort":
        table.turn(table.abort(1), table.request(2, range(50, 60), 2))
    else:
        table.turn(table.done(EOS), table.request(2, range(50, 60), 2))
    taken = []
    while table.flying:
        in_flight = {1} if 1 in table.decoding or table.flying[0].step_id < 2 else set()
        turned = table.turn(table.done())
        taken += [start for step in turned.steps for start in step.starts]
        if in_flight and table.flying and table.flying[0].step_id < 2:
            assert taken == []
    (start,) = taken
    assert named <= set(start.blocks)
    assert list(table.finished) == [1, 2]


def test_newcomers_wait_when_somebody_was_preempted_in_this_plan():
    table = Table(num_blocks=4, prefix_cache=False, decode_reserve_blocks=0)
    fill(table, table.request(1, range(4), 9), table.request(2, range(50, 62), 4))
    turned = table.turn(table.done(), table.request(9, [1], 2, priority=9))
    # the victim gave three blocks, one was needed: there is room, but not at the expense of who just lost it
    assert preempted(turned) == [2]
    assert table.scheduler.stats().free_blocks == 2
    assert turned.starts == []
    assert table.turn(table.done()).starts == [9]


def test_the_preempted_are_served_before_newer_ones():
    table = Table(num_blocks=4, decode_reserve_blocks=0)
    crowd(table, [0, 0, 0, 0])
    starts = []
    turned = table.turn(table.done(), table.request(9, [1], 2))
    while table.flying:
        turned = table.turn(table.done())
        starts += turned.starts
    assert starts.index(2) < starts.index(3) < starts.index(9)


def test_a_request_that_can_never_fit_is_a_defect_of_prepare():
    table = Table(num_blocks=2)
    table.turn(table.request(1, range(4), 6))
    with pytest.raises(InvariantBroken, match="no other is left to preempt"):
        table.run()
