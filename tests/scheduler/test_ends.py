"""The scheduler: how a request ends - stop ids, stop strings, length, abort, deadline (docs/design.md,
rules 13, 14)."""

from __future__ import annotations

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.actions import FinishRequest
from tests.scheduler.table import Table

EOS = 7
STOPS = {"stop_ids": frozenset({EOS})}
CHECKS = {"emits": True, "checks_stops": True}


# -- stop ids


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 8])
def test_a_stop_id_ends_it_and_is_kept(at):
    table = Table()
    table.turn(table.request(1, range(6), 20, **STOPS))
    for token in range(100, 100 + at):
        assert table.turn(table.done(token)).finishes == []
    turned = table.turn(table.done(EOS))
    end = turned.finish
    assert (end.reason, end.matched_stop) == ("stop", EOS)
    assert end.token_ids == (*range(100, 100 + at), EOS)
    assert end.num_rows == table.num_rows(1) == 6 + at
    assert turned.steps == []
    assert table.is_empty()


def test_a_stop_id_in_the_prompt_means_nothing():
    table = Table()
    table.run(table.request(1, [EOS, EOS, 1], 3, **STOPS))
    assert table.finished[1].reason == "length"


def test_at_depth_2_the_token_after_the_stop_is_overrun():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(4), 20, emits=True, **STOPS))
    turned = table.turn(table.done(EOS))
    assert turned.finish.token_ids == (EOS,)
    assert turned.emitted == [(1, EOS)]
    # the step in flight still names its blocks
    stats = table.scheduler.stats()
    assert (stats.running, stats.free_blocks) == (0, 64 - 2)
    turned = table.turn(table.done(EOS))
    assert (turned.emits, turned.finishes, turned.steps) == ([], [], [])
    assert table.scheduler.stats().dropped_tokens == 1
    assert table.is_empty()


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_min_tokens(min_tokens, length):
    table = Table()
    table.turn(table.request(1, range(3), 9, min_tokens=min_tokens, **STOPS))
    while table.flying:
        table.turn(table.done(EOS))
    assert table.finished[1].token_ids == (EOS,) * length
    assert table.finished[1].reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_id_as_the_last_token_is_a_stop(depth):
    table = Table(pipeline_depth=depth)
    table.turn(table.request(1, range(3), 3, **STOPS))
    table.turn(table.done(50))
    table.turn(table.done(51))
    turned = table.turn(table.done(EOS))
    assert (turned.finish.reason, turned.finish.token_ids) == ("stop", (50, 51, EOS))
    assert table.is_empty()


def test_each_ends_for_itself():
    table = Table()
    group = [table.request(key, [key], 9, group=1, **STOPS) for key in (1, 2, 3)]
    table.turn(*group)
    assert table.turn(table.done(EOS, 60, 61)).finish.key == 1
    assert table.turn(table.abort(3)).finish.key == 3
    assert table.turn(table.done(EOS, 99)).finish.key == 2


# -- stop strings


def test_it_ends_by_length_only_after_the_answer_for_its_last_token():
    table = Table()
    table.turn(table.request(1, range(3), 2, **CHECKS))
    table.turn(table.done(50))
    table.turn(table.checked(1, 1))
    turned = table.turn(table.done(51))
    assert (turned.emitted, turned.finishes) == ([(1, 51)], [])
    assert table.scheduler.stats().running == 1
    end = table.turn(table.checked(1, 2)).finish
    assert (end.reason, end.token_ids, end.num_rows) == ("length", (50, 51), 4)
    assert table.is_empty()


def test_an_answer_for_an_earlier_token_is_not_the_answer():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(3), 2, **CHECKS))
    table.turn(table.done(50), table.done(51))
    assert table.turn(table.checked(1, 1)).finishes == []
    assert table.turn(table.checked(1, 2)).finish.reason == "length"


def test_a_match_on_the_last_token_is_a_stop_and_drops_what_follows():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(3), 9, **CHECKS))
    table.turn(table.done(50))
    turned = table.turn(table.done(51), table.matched(1, 1))
    end = turned.finish
    assert (end.reason, end.token_ids, end.num_rows, end.matched_stop) == ("stop", (50,), 3, -1)
    assert table.scheduler.stats().dropped_tokens == 1
    # another one is in flight
    table.turn(table.done(52))
    assert table.scheduler.stats().dropped_tokens == 2
    assert table.is_empty()


def test_a_match_may_cut_a_block_that_was_sealed_for_overrun():
    table = Table()
    table.turn(table.request(1, range(4), 12, **CHECKS))
    for token in range(6):
        table.turn(table.done(token))
    end = table.turn(table.matched(1, 2)).finish
    assert (end.token_ids, end.num_rows) == ((0, 1), 5)
    assert table.num_rows(1) >= 5


def test_a_stop_id_waits_for_the_answer_and_overrun_is_dropped():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(3), 9, **CHECKS, **STOPS))
    turned = table.turn(table.done(EOS))
    assert (turned.emitted, turned.finishes, turned.steps) == ([(1, EOS)], [], [])
    turned = table.turn(table.done(51))
    assert (turned.emitted, turned.finishes) == ([], [])
    end = table.turn(table.checked(1, 1)).finish
    assert (end.reason, end.token_ids, end.matched_stop, end.num_rows) == ("stop", (EOS,), EOS, 3)
    assert table.scheduler.stats().dropped_tokens == 1


def test_a_match_wins_over_the_stop_id_that_it_waited_with():
    table = Table()
    table.turn(table.request(1, range(3), 9, **CHECKS, **STOPS))
    table.turn(table.done(EOS))
    end = table.turn(table.matched(1, 1)).finish
    assert (end.reason, end.matched_stop) == ("stop", -1)


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_an_abort_while_an_answer_is_awaited_drops_the_overrun_too(how):
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(3), 9, deadline=5.0, **CHECKS, **STOPS))
    table.turn(table.done(50))
    table.turn(table.done(EOS))
    table.turn(table.done(52))
    end = table.turn(table.abort(1) if how == "abort" else table.timer(5.0)).finish
    assert (end.reason, end.token_ids, end.num_rows) == (how, (50, EOS), 4)
    assert table.is_empty()


def test_answers_for_ended_sequences_are_late_and_harmless():
    table = Table()
    table.turn(table.request(1, range(3), 9, **CHECKS))
    table.turn(table.done(50))
    table.turn(table.abort(1))
    assert table.turn(table.checked(1, 1), table.matched(1, 1)).finishes == []


# -- abort


def test_abort_while_waiting():
    table = Table(max_running=1)
    table.turn(table.request(1, [1], 9), table.request(2, range(9), 9))
    end = table.turn(table.abort(2)).finish
    assert (end.reason, end.token_ids, end.num_rows, end.cached_tokens) == ("abort", (), 0, (0, 0, 0))
    assert table.scheduler.stats().waiting == 0


def test_abort_in_the_turn_of_arrival():
    table = Table()
    turned = table.turn(table.request(1, range(9), 9), table.abort(1))
    assert turned.names() == ["FinishRequest"]
    assert table.is_empty()


@pytest.mark.parametrize(("done", "rows"), [(0, 0), (1, 8), (2, 16)])
def test_abort_during_prefill_returns_the_rows_of_completed_chunks(done, rows):
    table = Table(max_step_tokens=8)
    table.turn(table.request(1, range(30), 9))
    for _ in range(done):
        table.turn(table.done())
    end = table.turn(table.abort(1)).finish
    assert (end.reason, end.token_ids, end.num_rows) == ("abort", (), rows)
    assert table.num_rows(1) == rows
    # the chunk in flight still writes its blocks
    assert not table.is_empty()
    turned = table.turn(table.done())
    assert (turned.names(), table.is_empty()) == ([], True)
    # and what it filled serves the next one
    (start,) = table.turn(table.request(2, range(30), 9)).step.starts
    assert start.num_cached == rows + 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_abort_while_decoding_returns_tokens_and_rows_so_far(depth, tokens):
    table = Table(pipeline_depth=depth)
    table.turn(table.request(1, range(6), 20))
    for token in range(100, 100 + tokens):
        table.turn(table.done(token))
    end = table.turn(table.abort(1)).finish
    assert (end.reason, end.token_ids) == ("abort", tuple(range(100, 100 + tokens)))
    assert end.num_rows == table.num_rows(1) == 6 + tokens - 1
    while table.flying:
        assert table.turn(table.done()).names() == []
    assert table.is_empty()
    assert table.scheduler.stats().dropped_tokens == depth


def test_abort_when_its_last_token_is_in_flight():
    table = Table()
    table.turn(table.request(1, range(6), 2))
    table.turn(table.done(50))
    end = table.turn(table.abort(1)).finish
    assert (end.token_ids, end.num_rows) == ((50,), 6)
    table.turn(table.done(51))
    assert list(table.finished) == [1]
    assert table.is_empty()


def test_abort_and_the_last_step_in_one_turn_end_it_once():
    for events in ("abort first", "done first"):
        table = Table()
        table.turn(table.request(1, range(6), 1))
        both = [table.done(50), table.abort(1)]
        turned = table.turn(*(both if events == "done first" else reversed(both)))
        assert turned.finish.reason == ("length" if events == "done first" else "abort")
        assert table.scheduler.stats().late_aborts == (events == "done first")


def test_aborts_of_strangers_are_counted():
    table = Table()
    table.turn(table.abort(1, 2, 3))
    assert table.scheduler.stats().late_aborts == 3


def test_rows_start_where_they_are_wanted_when_it_is_aborted_before_that():
    table = Table(max_step_tokens=8)
    table.turn(table.request(1, range(30), 9, start=20))
    table.turn(table.done())
    assert table.turn(table.abort(1)).finish.num_rows == 0
    assert table.rows == {}


def test_the_runner_forgets_aborted_sequences_with_the_next_step():
    table = Table()
    table.turn(table.request(1, [1], 9), table.request(2, [2], 9))
    table.turn(table.abort(1))
    turned = table.turn(table.done())
    assert turned.step.leaves == (1,)
    assert table.turn(table.done()).step.leaves == ()


# -- deadlines


@pytest.mark.parametrize("where", ["waiting", "decoding"])
def test_a_deadline_ends_it_with_what_there_is(where):
    table = Table(max_running=1)
    ahead = [table.request(0, [0], 90)] if where == "waiting" else []
    turned = table.turn(*ahead, table.request(1, [1], 9, deadline=5.0))
    assert [wake.time for wake in turned.wakes] == [5.0]
    table.turn(table.done(50, at=4.9))
    assert table.finished == {}
    end = table.turn(table.timer(5.0)).finish
    assert (end.key, end.reason) == (1, "deadline")
    assert end.token_ids == (() if where == "waiting" else (50,))


def test_any_event_that_is_late_enough_meets_the_deadline():
    table = Table()
    table.turn(table.request(1, [1], 9, deadline=5.0))
    turned = table.turn(table.done(50, at=5.5))
    assert turned.finish.token_ids == (50,)
    assert turned.steps == []


def test_one_timer_for_the_earliest_deadline():
    table = Table()
    assert [wake.time for wake in table.turn(table.request(1, [1], 9, deadline=8.0)).wakes] == [8.0]
    assert table.turn(table.request(2, [2], 9, deadline=9.0)).wakes == []
    assert [wake.time for wake in table.turn(table.request(3, [3], 9, deadline=6.0)).wakes] == [6.0]
    turned = table.turn(table.timer(6.0))
    assert (turned.finish.key, [wake.time for wake in turned.wakes]) == (3, [8.0])
    # who has ended needs no timer any more
    assert [wake.time for wake in table.turn(table.abort(1)).wakes] == [9.0]
    assert table.turn(table.timer(9.0)).finish.key == 2


def test_equal_deadlines_fire_together():
    table = Table()
    table.turn(*(table.request(key, [key], 9, deadline=5.0) for key in (1, 2, 3)))
    assert [end.key for end in table.turn(table.timer(5.0)).finishes] == [1, 2, 3]


def test_a_timer_that_rings_a_little_early_is_set_again():
    # loops round timers to their clock's resolution
    table = Table()
    table.turn(table.request(1, [1], 9, deadline=5.0))
    turned = table.turn(table.timer(4.9996))
    assert turned.finishes == []
    assert [wake.time for wake in turned.wakes] == [5.0]


def test_deadlines_of_ended_sequences_do_not_pile_up():
    table = Table()
    # the earliest deadline is that of somebody who stays
    table.turn(table.request(0, [1], 100, deadline=10.0))
    for key in range(1, 500):
        table.turn(table.request(key, [1], 1, deadline=1e6 - key), table.abort(key))
    assert len(table.scheduler._deadlines) < 100
    table.turn(table.request(500, [1], 100, deadline=20.0))
    turned = table.turn(table.timer(10.0))
    assert (turned.finish.key, [wake.time for wake in turned.wakes]) == (0, [20.0])


def test_without_a_deadline_no_timer():
    table = Table()
    assert table.turn(table.request(1, [1], 9)).wakes == []


@pytest.mark.parametrize("keep", [-1, 0, 2])
def test_a_match_outside_of_the_output_is_refused(keep):
    table = Table()
    table.turn(table.request(1, range(3), 9, **CHECKS))
    table.turn(table.done(50))
    with pytest.raises(InvariantBroken, match="a stop matched at token"):
        table.turn(table.matched(1, keep))


# -- salvage


def test_salvage_ends_everything_with_what_it_has_and_plans_nothing():
    table = Table(pipeline_depth=2, max_running=3)
    table.turn(
        table.request(1, range(6), 9),
        table.request(2, range(50, 53), 9, **CHECKS, **STOPS),
        table.request(3, range(100, 130), 9),
        table.request(4, [4], 9),
    )
    table.turn(table.done(60, EOS))
    table.turn(table.done(61, 62))
    actions = table.scheduler.salvage()
    ends = {action.key: action for action in actions if isinstance(action, FinishRequest)}
    assert [type(action).__name__ for action in actions] == ["CopyRows"] + ["FinishRequest"] * 4
    assert {end.reason for end in ends.values()} == {"failed"}
    assert [ends[key].token_ids for key in (1, 2, 3, 4)] == [(60, 61), (EOS,), (), ()]
    assert [ends[key].num_rows for key in (1, 2, 4)] == [7, 3, 0]
    assert table.scheduler.salvage() == []
