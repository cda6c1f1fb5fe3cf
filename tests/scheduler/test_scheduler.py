"""The pure scheduler, events in and actions out: batches, chunks, order, protocol."""

from __future__ import annotations

from array import array
from typing import get_args

import pytest

from fdasync.cache.blocks import HostHold
from fdasync.errors import InvariantBroken
from fdasync.events.actions import BlockAppend
from fdasync.events.catalog import Event, StepDone, StepFailed, TimerFired
from tests.scheduler.table import Table

# -- continuous batching


def test_sequences_join_and_leave_between_steps():
    table = Table()
    a, b = table.request(1, range(3), 3), table.request(2, range(50, 52), 2)
    first = table.turn(a)
    assert first.starts == [1]
    assert first.chunks == [(1, 3, True)]
    second = table.turn(table.done(100), b)
    assert (second.starts, second.chunks, second.step.skips) == ([2], [(2, 2, True)], ())
    third = table.turn(table.done(101, 200))
    # both compute their last token in this step: known when it is planned, so they leave with the next one
    assert (third.starts, third.chunks, third.step.leaves) == ([], [], ())
    fourth = table.turn(table.done(102, 201), table.request(3, [9], 1))
    assert [(end.key, end.reason, end.token_ids) for end in fourth.finishes] == [
        (1, "length", (100, 101, 102)),
        (2, "length", (200, 201)),
    ]
    assert fourth.step.leaves == (1, 2)
    table.run()
    assert table.is_empty()


def test_a_start_carries_all_that_the_runner_needs():
    table = Table(num_blocks=8)
    event = table.request(5, range(6), 4)
    (start,) = table.turn(event).step.starts
    assert start.tokens == array("i", range(6)).tobytes()
    assert (start.key, start.num_cached, start.sampler) == (5, 0, event.sampler)
    assert len(set(start.blocks)) == 2
    assert len(start.slots) == len(start.generations) == 2
    assert all(generation > 0 for generation in start.generations)


def test_without_capture_there_are_no_slots_and_no_rows():
    table = Table(capture=False)
    first = table.turn(table.request(1, range(4), 3, start=-1))
    (start,) = first.step.starts
    assert (start.slots, start.generations) == ((), ())
    second = table.turn(table.done())
    assert second.step.appends == (BlockAppend(1, second.step.appends[0].block, -1, 0),)
    table.run()
    assert table.rows == {}
    assert table.finished[1].num_rows == 0


def test_a_decode_gets_a_block_just_when_its_last_one_is_full():
    table = Table()
    table.turn(table.request(1, range(3), 8))
    appends = [table.turn(table.done()).step.appends for _ in range(7)]
    # the first step forwards 3, the decodes positions 3, 4, ... 9: blocks begin at 4 and 8
    assert [len(step) for step in appends] == [0, 1, 0, 0, 0, 1, 0]
    blocks = [append.block for step in appends for append in step]
    slots = [(append.slot, append.generation) for step in appends for append in step]
    assert len(set(blocks)) == len(set(slots)) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_one_token_needs_no_decode(depth):
    table = Table(pipeline_depth=depth)
    assert len(table.turn(table.request(1, range(4), 1)).steps) == 1
    end = table.turn(table.done(77)).finish
    assert (end.reason, end.token_ids, end.num_rows) == ("length", (77,), 4)
    assert table.is_empty()


def test_depth_2_plans_ahead_but_never_past_the_length_limit():
    table = Table(pipeline_depth=2)
    first = table.turn(table.request(1, range(2), 3))
    assert [step.step_id for step in first.steps] == [0, 1]
    second = table.turn(table.done(10))
    assert [step.step_id for step in second.steps] == [2]
    assert table.turn(table.done(11)).steps == []
    last = table.turn(table.done(12))
    assert last.finish.token_ids == (10, 11, 12)
    assert table.scheduler.stats().dropped_tokens == 0


def test_several_steps_may_be_done_in_one_turn():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(2), 5, emits=True))
    done = [table.done(10), table.done(11)]
    turned = table.turn(*done)
    assert turned.emitted == [(1, 10), (1, 11)]
    assert len(turned.steps) == 2


# -- token budget


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget():
    table = Table(max_step_tokens=16)
    assert table.turn(table.request(1, range(40))).chunks == [(1, 16, False)]
    assert table.turn(table.done()).chunks == [(1, 16, False)]
    assert table.turn(table.done()).chunks == [(1, 8, True)]
    # only the last chunk samples
    assert table.sampled(table.flying[0]) == 1


def test_decodes_come_first_and_chunks_take_what_is_left():
    table = Table(max_step_tokens=6, max_running=6)
    table.turn(table.request(1, [1], 20), table.request(2, [2], 20))
    turned = table.turn(table.done(), table.request(3, range(10), 5))
    assert turned.chunks == [(3, 4, False)]
    turned = table.turn(table.done(), table.request(4, [4], 5))
    # the prefill under way goes on before anyone is admitted
    assert turned.chunks == [(3, 4, False)]
    assert turned.starts == []
    turned = table.turn(table.done())
    assert turned.chunks == [(3, 2, True), (4, 1, True)]


def test_several_prompts_share_one_step_in_order():
    table = Table(max_step_tokens=10)
    turned = table.turn(*(table.request(key, range(key * 100, key * 100 + 4)) for key in (1, 2, 3)))
    assert turned.chunks == [(1, 4, True), (2, 4, True), (3, 2, False)]


def test_no_step_is_larger_than_the_budget_when_everything_decodes():
    table = Table(max_step_tokens=3, max_running=3)
    table.turn(*(table.request(key, [key], 9) for key in (1, 2, 3)))
    turned = table.turn(table.done(), table.request(4, [4], 9))
    assert turned.chunks == []
    assert turned.starts == []


# -- who runs


def test_no_more_sequences_run_than_allowed_and_the_next_one_joins_as_one_leaves():
    table = Table(max_running=2)
    turned = table.turn(*(table.request(key, [key], 3) for key in (1, 2, 3)))
    assert turned.starts == [1, 2]
    assert table.scheduler.stats().waiting == 1
    table.turn(table.done())
    assert table.turn(table.done()).starts == []
    # 1 and 2 computed their last tokens in the step before
    turned = table.turn(table.done())
    assert (turned.starts, turned.step.leaves) == ([3], (1, 2))


def test_higher_priority_first_then_older():
    table = Table(max_running=1)
    table.turn(table.request(1, [1], 1))
    waiting = [(2, 0), (3, 1), (4, 5), (5, 1), (6, -2)]
    turned = table.turn(*(table.request(key, [key], 1, priority=priority) for key, priority in waiting))
    order = []
    while table.flying:
        turned = table.turn(table.done())
        order += turned.starts
    assert order == [4, 3, 5, 2, 6]


def test_a_request_without_room_is_not_overtaken():
    table = Table(num_blocks=8, decode_reserve_blocks=0)
    table.turn(table.request(1, range(16), 16))
    turned = table.turn(table.done(), table.request(2, range(100, 120), 1), table.request(3, [3], 1))
    assert turned.starts == []
    table.run()
    assert list(table.finished) == [1, 2, 3]


def test_admission_leaves_a_reserve_for_sequences_that_decode():
    def admitted(num_blocks, reserve):
        table = Table(num_blocks=num_blocks, decode_reserve_blocks=reserve)
        table.turn(table.request(1, range(8), 9), table.request(2, range(50, 58), 9))
        return table.turn(table.done(), table.request(3, range(100, 112), 4)).starts

    # two blocks each, and both take one more now; three are needed for the third
    assert admitted(8, 0) == []
    assert admitted(9, 0) == [3]
    assert admitted(10, 1) == []
    assert admitted(11, 1) == [3]


def test_the_reserve_is_a_quarter_of_all_blocks_at_most_and_nothing_for_one_alone():
    table = Table(num_blocks=8, decode_reserve_blocks=100)
    turned = table.turn(table.request(1, range(31), 2))
    assert turned.starts == [1]
    table.run()
    table.turn(table.request(2, range(200, 204), 20))
    # it decodes into its second block: 8 - 2 used - 2 reserved are fewer than 5
    assert table.turn(table.done(), table.request(3, range(300, 320), 2)).starts == []
    table = Table(num_blocks=8, decode_reserve_blocks=100)
    table.turn(table.request(2, range(200, 204), 9))
    # it never needs more than one further block
    assert table.turn(table.done(), table.request(3, range(300, 320), 2)).starts == [3]
    table = Table(num_blocks=8, decode_reserve_blocks=100)
    table.turn(table.request(2, range(200, 202), 9))
    assert table.turn(table.done(), table.request(3, range(300, 320), 2)).starts == [3]


# -- rows


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("start", [0, 1, 4, 6])
@pytest.mark.parametrize(("prompt", "output"), [(7, 1), (7, 2), (8, 5), (9, 8), (21, 4)])
def test_rows_are_contiguous_from_start_to_the_last_forwarded_token(depth, start, prompt, output):
    table = Table(pipeline_depth=depth, max_step_tokens=16)
    table.run(table.request(1, range(prompt), output, start=start))
    want = prompt + output - 1 - start
    assert table.finished[1].num_rows == want
    # each span begins where the last one ended
    position = start
    for offset, count in table.rows[1]:
        assert offset == position % 4
        position += count
    assert position == start + want


def test_rows_of_an_output_come_every_eighth_block_apart_by_key():
    table = Table(num_blocks=200, max_step_tokens=64)
    keys = range(8)
    table.run(*[table.request(key, range(100 * key, 100 * key + 4), 131) for key in keys])
    begins = set()
    for key in keys:
        counts = [count for _, count in table.rows[key]]
        assert sum(counts) == table.finished[key].num_rows == 134
        assert max(counts) == 8 * 4
        # what a sequence asks for in the middle of its life lies eight blocks apart
        begins.add(sum(counts[:2]))
    assert len(begins) == 8


def test_a_request_that_wants_no_rows_gets_none():
    table = Table()
    table.run(table.request(1, range(7), 5, start=-1))
    assert table.rows == {}
    assert table.finished[1].num_rows == 0


def test_rows_are_copied_before_a_step_that_may_write_their_slots_and_before_the_end():
    table = Table(num_blocks=2, prefix_cache=False)
    table.turn(table.request(1, range(7), 1), table.request(2, range(8), 1))
    assert table.turn(table.done()).names() == ["CopyRows", "FinishRequest", "RunStep"]


# -- emits


def test_only_tokens_that_are_wanted_as_they_come_are_emitted_with_their_rows():
    table = Table()
    table.turn(table.request(1, [1], 4), table.request(2, [2], 4, emits=True), table.request(3, [3], 4, emits=True))
    (emit,) = table.turn(table.done(10, 20, 30)).emits
    assert (emit.step_id, emit.keys, emit.tokens, emit.rows) == (0, (2, 3), (20, 30), (1, 2))
    (emit,) = table.turn(table.done(11, 21, 31), table.request(4, [4], 4, emits=True)).emits
    assert (emit.keys, emit.tokens, emit.rows) == ((2, 3), (21, 31), (1, 2))
    (emit,) = table.turn(table.done(12, 22, 32, 42)).emits
    assert (emit.keys, emit.tokens, emit.rows) == ((2, 3, 4), (22, 32, 42), (1, 2, 3))


def test_nothing_is_emitted_without_a_reader():
    table = Table()
    table.turn(table.request(1, [1], 4))
    assert table.turn(table.done()).emits == []


def test_the_last_token_is_emitted_before_the_end():
    table = Table()
    table.turn(table.request(1, [1], 1, emits=True))
    assert table.turn(table.done()).names() == ["EmitTokens", "CopyRows", "FinishRequest"]


# -- protocol


def fly(table):
    table.turn(table.request(1, [1], 4))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([StepDone(step_id=1, tokens=(5,))], "step 1 is done, but 0 was in flight first"),
        ([StepDone(step_id=0, tokens=())], "returned 0 tokens for 1 sequences"),
        ([StepDone(step_id=0, tokens=(5, 6))], "returned 2 tokens for 1 sequences"),
        ([StepDone(step_id=0, tokens=(5,)), StepDone(step_id=0, tokens=(5,))], "step 0 is done, but None"),
        ([StepFailed(step_id=0, problem="smoke")], "step 0 failed.*smoke"),
        ([Event()], "knows no event Event"),
    ],
)
def test_what_contradicts_the_protocol_is_refused(events, message):
    table = Table()
    fly(table)
    with pytest.raises(InvariantBroken, match=message):
        table.scheduler.handle(events)


def test_a_key_is_prepared_once():
    table = Table()
    with pytest.raises(InvariantBroken, match="sequence 1 was prepared twice"):
        table.turn(table.request(1, [1]), table.request(1, [1]))


def test_nothing_to_do_is_nothing_done():
    table = Table()
    assert table.turn().actions == []
    assert table.turn(TimerFired(at=3.0)).actions == []


def test_the_same_events_give_the_same_actions():
    def play():
        table = Table(pipeline_depth=2, num_blocks=10)
        seen = [table.turn(*(table.request(key, range(key, key + 9), 12, emits=True) for key in range(4))).actions]
        while table.flying:
            seen.append(table.turn(table.done()).actions)
        return seen

    assert play() == play()


def test_check_finds_a_lost_pin_and_a_stall():
    table = Table()
    fly(table)
    (seq,) = table.scheduler.queues.decoding.values()
    seq.blocks[0].ref_count += 1
    with pytest.raises(InvariantBroken, match="2 pins, 1 sequences use it"):
        table.scheduler.check()
    seq.blocks[0].ref_count -= 1
    table.scheduler._inflight.clear()
    with pytest.raises(InvariantBroken, match="wait for nothing"):
        table.scheduler.check()
    table.scheduler.queues._draining[0] = [seq]
    with pytest.raises(InvariantBroken, match="no step is in flight"):
        table.scheduler.check()


@pytest.mark.parametrize("reason", get_args(HostHold))
def test_check_names_the_reason_for_which_a_host_block_is_held_too_long(reason):
    table = Table(num_host_blocks=4)
    fly(table)
    (seq,) = table.scheduler.queues.decoding.values()
    seq.blocks[0].hold(reason)
    with pytest.raises(InvariantBroken, match=f"1 host blocks are held for {reason}, 0 should be"):
        table.scheduler.check()
    seq.blocks[0].unhold(reason)
    table.scheduler.check()


def test_check_finds_a_copy_that_counts_for_a_sequence_that_left():
    table = Table(num_host_blocks=4)
    table.turn(table.request(1, range(9)))
    table.turn(table.done())
    (seq,) = table.scheduler.queues.decoding.values()
    table.scheduler.swap_planner.keep(seq.blocks[0])
    table.turn()
    (copy,) = table.scheduler.swap_planner._copies.values()
    copy.waiting.append(seq)
    with pytest.raises(InvariantBroken, match="waits for copy 0, and does not know it"):
        table.scheduler.check()


def test_counters():
    table = Table()
    table.run(table.request(1, range(9), 3))
    table.run(table.request(2, range(9), 2))
    stats = table.scheduler.stats()
    assert (stats.finished, stats.generated_tokens, stats.prompt_tokens, stats.hit_tokens) == (2, 5, 18, 8)
    assert (stats.steps, stats.late_aborts, stats.preemptions, stats.evictions) == (5, 0, 0, 0)
