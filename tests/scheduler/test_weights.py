"""The scheduler when it is paused and when the weights change under it (docs/design.md, rules 1, 9, 10)."""

from __future__ import annotations

from array import array

import pytest

from tests.scheduler.table import Table, span
from tests.scheduler.tiers.scenes import hang, leave_on_host
from tests.scheduler.updates import stop_steps, update

A, B = range(9), range(100, 109)


# -- pause


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_plans_nothing_and_resume_goes_on_where_it_was(depth):
    table = Table(pipeline_depth=depth)
    table.turn(table.request(1, A, 6), table.request(2, B, 6))
    turned = table.turn(table.pause(), table.done())
    assert turned.steps == []
    assert table.stats.paused
    while table.flying:
        assert table.turn(table.done()).steps == []
    assert table.turn(table.request(3, [5], 2)).steps == []
    before = table.num_rows(1)
    turned = table.turn(table.resume())
    assert len(turned.steps) == depth
    assert turned.starts == [3]
    assert not table.stats.paused
    table.run()
    assert [table.finished[key].num_rows for key in (1, 2, 3)] == [14, 14, 2]
    assert table.num_rows(1) == 14 > before
    assert [table.finished[key].spans for key in (1, 2, 3)] == [(span(0, "0"),)] * 3


def test_a_request_that_ends_with_a_step_in_flight_ends_while_paused():
    table = Table()
    table.turn(table.request(1, A, 1))
    turned = table.turn(table.pause(), table.done())
    assert turned.finish.reason == "length"
    assert table.is_empty()


def test_deadlines_and_aborts_fire_while_paused():
    table = Table()
    table.turn(table.request(1, A, 6, deadline=9.0), table.request(2, B, 6), table.request(3, [4], 2, deadline=5.0))
    stop_steps(table)
    turned = table.turn(table.timer(5.0))
    assert [(end.key, end.reason) for end in turned.finishes] == [(3, "deadline")]
    assert [wake.time for wake in turned.wakes] == [9.0]
    assert table.turn(table.timer(9.0)).finish.key == 1
    assert table.turn(table.abort(2)).finish.reason == "abort"
    assert table.turn(table.resume()).steps == []
    assert table.is_empty()


def test_no_copy_starts_while_paused_and_those_in_flight_end():
    table = Table(num_blocks=4, num_host_blocks=8)
    table.run(table.request(1, A, 1))
    assert len(table.turn(table.request(2, range(50, 63), 2)).outs) == 1
    turned = table.turn(table.pause(), table.copied())
    assert (turned.outs, turned.steps) == ([], [])
    turned = table.turn(table.request(3, range(200, 216), 1))
    assert turned.outs == []
    assert table.turn(table.resume()).starts == [2]
    table.run()
    assert table.is_empty()


def test_what_arrives_while_paused_starts_after_it():
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 2))
    assert table.turn(table.pause(), table.copied()).starts == []
    assert table.turn(table.resume()).cached == {1: 8}
    table.run()


# -- keep: with KV on the device


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_sequence_goes_on_with_its_blocks_and_shares_none_of_them(depth):
    table = Table(pipeline_depth=depth, max_step_tokens=64)
    (start,) = table.turn(table.request(1, A, 20)).steps[0].starts
    table.turn(table.done())
    stop_steps(table)
    tokens_then = 1 + depth
    turned = update(table, 7)
    # no start, no leave: the runner has it as it was
    assert (turned.starts, turned.steps[0].leaves) == ([], ())
    assert turned.hashes == []
    assert table.places(A, b"") == ["", ""]
    table.run()
    end = table.finished[1]
    assert end.spans == (span(0, "0"), span(tokens_then, "7"))
    assert (len(end.token_ids), end.num_rows) == (20, 28)
    # nothing that it computed is found by anybody
    whole = [*A, *end.token_ids]
    for namespace in (b"", table.namespace):
        assert set(table.places(whole, namespace)) == {""}
    assert table.is_empty()
    assert table.stats.free_blocks == table.stats.num_blocks
    assert table.turn(table.request(2, whole, 1)).cached == {2: 0}
    assert start.num_cached == 0
    table.run()


def test_a_label_that_returns_with_other_weights_begins_a_span_of_its_own():
    table = Table(max_step_tokens=64)
    table.turn(table.request(1, A, 20))
    table.turn(table.done())
    # the same label for other weights, another label for the same, and the first one again
    for version, weights_id in ((3, "x"), (3, "y"), (4, "y"), (3, "x")):
        stop_steps(table)
        table.turn(table.weights(version, weights_id), table.resume())
        table.turn(table.done())
    table.run()
    spans = table.finished[1].spans
    assert [named for _, *named in spans] == [["0", ""], ["3", "x"], ["3", "y"], ["4", "y"], ["3", "x"]]
    assert len({first for first, *_ in spans}) == 5


def test_a_prefill_under_way_goes_on_too():
    table = Table(max_step_tokens=8)
    table.turn(table.request(1, range(40), 3))
    table.turn(table.done())
    stop_steps(table)
    turned = update(table, 2)
    assert turned.chunks == [(1, 8, False)]
    assert turned.starts == []
    table.run()
    assert table.finished[1].spans == (span(0, "2"),)
    assert set(table.places(range(40))) | set(table.places(range(40), b"")) == {""}
    assert table.finished[1].num_rows == 42


def test_a_chain_of_updates_is_told_where_each_began():
    table = Table()
    table.turn(table.request(1, A, 20))
    for version in (3, 4, 9):
        for _ in range(3):
            table.turn(table.done())
        stop_steps(table)
        if version == 4:
            # twice without a token between: the first never sampled anything
            update(table, 100, resume=False)
        update(table, version)
    table.run()
    spans = table.finished[1].spans
    assert [version for _, version, _ in spans] == ["0", "3", "4", "9"]
    assert [first for first, *_ in spans] == [0, 4, 8, 12]


def test_a_span_that_no_returned_token_belongs_to_is_not_told():
    table = Table(pipeline_depth=1)
    table.turn(table.request(1, A, 20, checks_stops=True, emits=True))
    table.turn(table.done())
    stop_steps(table)
    update(table, 5)
    table.turn(table.done())
    end = table.turn(table.matched(1, 2)).finish
    assert (len(end.token_ids), end.spans) == (2, (span(0, "0"),))
    table.run()


def test_what_it_holds_is_freed_at_once_when_it_ends():
    table = Table(num_blocks=8, num_host_blocks=8, store=True, prefill_tokens_per_s=1e9)
    table.turn(table.request(1, A, 6))
    table.turn(table.done())
    table.answer()
    stop_steps(table)
    table.answer()
    update(table, 1)
    turned = table.turn(table.abort(1))
    assert turned.outs == []
    table.run()
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (8, 8)
    assert table.stats.swapped_out_blocks == 2


@pytest.mark.parametrize("before", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_kept_one_that_is_preempted_recomputes_everything_and_is_indexed_again(depth, before):
    """`before`: steps until the update; the younger one may not have a full block by then."""
    table = Table(num_blocks=8, decode_reserve_blocks=0, pipeline_depth=depth)
    table.turn(table.request(1, range(4), 20), table.request(2, [50, 51], 22))
    for _ in range(before):
        table.turn(table.done())
    stop_steps(table)
    update(table, 6)
    asked = []
    starts = []
    while 2 not in table.finished:
        events = [table.done()] if table.flying else [table.hashed()]
        turned = table.turn(*events)
        asked += turned.hashes
        starts += [start for step in turned.steps for start in step.starts]
        # not before it has its identities again
        assert bool(starts) <= (bool(asked) and not table.hashes)
        if table.hashes and 1 in table.finished:
            turned = table.turn(table.hashed())
            starts += [start for step in turned.steps for start in step.starts]
    table.run()
    assert table.stats.preemptions == 1
    (again,) = asked
    (start,) = starts
    assert (again.key, start.key, start.num_cached) == (2, 2, 0)
    # tokens and rows that it had stay
    known = array("i", again.tokens)
    end = table.finished[2]
    assert list(known) == [50, 51, *end.token_ids][: len(known)]
    assert start.tokens == again.tokens
    assert (end.num_rows, table.num_rows(2)) == (23, 23)
    assert [version for _, version, _ in end.spans] == ["0", "6"]
    assert end.spans[1][0] == before + depth
    # its blocks are found under the new weights, those that it decoded later too
    whole = [50, 51, *end.token_ids][:23]
    assert table.places(whole) == ["device"] * 5
    assert set(table.places(whole, b"")) == {""}
    assert table.is_empty()


def test_a_kept_one_that_is_preempted_is_neither_copied_nor_written():
    table = Table(
        num_blocks=8, num_host_blocks=8, decode_reserve_blocks=0, store=True, prefill_tokens_per_s=1e9,
        write_through="off",
    )  # fmt: skip
    table.turn(table.request(1, range(8), 16), table.request(2, range(50, 58), 16))
    table.turn(table.done())
    stop_steps(table)
    update(table, 1)
    while not table.stats.preemptions:
        turned = table.turn(table.done())
        assert turned.outs == []
    turned = table.turn(table.done())
    assert table.stats.swapped_out_blocks == 0
    assert (turned.outs, turned.puts) == ([], [])
    assert table.stats.writing == 0
    table.run()
    assert table.is_empty()


def test_what_was_to_be_kept_of_a_kept_one_is_not_copied_any_more():
    table = Table(num_blocks=32, num_host_blocks=64)
    hang(table)
    table.turn(table.request(1, A, 9))
    table.turn(table.done())
    for block in table.scheduler.sequences[1].blocks[:2]:
        table.scheduler.swap_planner.keep(block)
    assert table.turn().outs == []
    stop_steps(table)
    # the slots of copies become free one after the other, and nothing takes them
    assert update(table, 1).outs == []
    while table.copies:
        assert table.turn(table.copied()).outs == []
    table.run()
    assert table.stats.swapped_out_blocks == 4
    assert table.is_empty()
