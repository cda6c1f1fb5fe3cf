"""The modes of a pause, in every state of a sequence (docs/design.md, rule 36)."""

from __future__ import annotations

import pytest

from fdasync.events.catalog import AbortRequested
from tests.scheduler.table import Table, span
from tests.scheduler.tiers.scenes import leave_on_host
from tests.scheduler.updates import stop_steps, update

A, B, C = range(9), range(100, 109), range(200, 209)


def let_steps_end(table):
    while table.flying:
        assert table.turn(table.done()).steps == []


# -- retract


@pytest.mark.parametrize("depth", [1, 2])
def test_retract_takes_the_blocks_of_all_that_run_the_oldest_too_and_they_match_again(depth):
    table = Table(pipeline_depth=depth)
    table.turn(table.request(1, A, 6), table.request(2, B, 6))
    table.turn(table.done())
    table.turn(table.done())
    assert table.turn(table.pause("retract")).steps == []
    let_steps_end(table)
    stats = table.stats
    assert (stats.paused, stats.running, stats.waiting, stats.preemptions) == (True, 0, 2, 0)
    # all that was sealed stays as cache, nothing else is in use
    assert stats.free_blocks + stats.idle_blocks == stats.num_blocks
    assert table.places(A) == ["device", "device"]
    rows = table.num_rows(1)
    assert rows == 10 + depth
    turned = table.turn(table.resume())
    assert turned.cached == {1: rows // 4 * 4, 2: 8}
    table.run()
    for key in (1, 2):
        assert (len(table.finished[key].token_ids), table.finished[key].num_rows) == (6, 14)
    assert table.num_rows(1) == 14
    assert table.is_empty()


def test_retract_of_what_is_paused_and_of_what_loads():
    table = Table(num_host_blocks=8, num_blocks=16)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 3), table.request(2, B, 3))
    assert (len(table.copies), table.stats.running) == (1, 2)
    table.turn(table.pause())
    assert table.stats.running == 2
    table.turn(table.pause("retract"))
    let_steps_end(table)
    assert (table.stats.running, table.stats.waiting) == (0, 2)
    # the copy goes on, and nobody waits for it
    assert table.turn(table.copied()).starts == []
    assert table.turn(table.resume()).cached == {1: 8, 2: 8}
    table.run()
    assert table.is_empty()


def test_retract_leaves_what_ends_by_itself():
    table = Table(pipeline_depth=1)
    table.turn(table.request(1, A, 1), table.request(2, [4], 3, checks_stops=True, stop_ids=frozenset({7}), emits=True))
    table.turn(table.done(5, 7), table.request(3, [5], 1))
    # the text of one of them is still to be searched; the only token of the other one is in flight
    table.turn(table.pause("retract"))
    assert table.stats.waiting == 0
    assert table.turn(table.done()).finish.key == 3
    assert table.turn(table.checked(2, 1)).finish.reason == "stop"
    assert table.is_empty()


def test_what_was_retracted_starts_anew_under_new_weights():
    table = Table()
    table.turn(table.request(1, A, 6))
    table.turn(table.done())
    table.turn(table.pause("retract"))
    let_steps_end(table)
    update(table, 3)
    assert table.turn(table.hashed()).cached == {1: 0}
    table.run()
    assert table.finished[1].spans == (span(0, "0"), span(2, "3"))
    assert table.num_rows(1) == 14
    assert table.places([*A, *table.finished[1].token_ids])[:3] == ["device"] * 3


# -- abort


@pytest.mark.parametrize("first", [None, "in_place", "wait"])
def test_abort_ends_all_and_later_ones_wait(first):
    table = Table(max_running=1)
    table.turn(table.request(1, A, 6), table.request(2, B, 6))
    table.turn(table.done())
    events = [] if first is None else [table.pause(first)]
    turned = table.turn(*events, table.pause("abort"), table.request(3, C, 2))
    assert [(end.key, end.reason, len(end.token_ids)) for end in turned.finishes] == [(1, "abort", 1), (2, "abort", 0)]
    let_steps_end(table)
    assert table.stats.paused
    assert (table.stats.waiting, table.stats.free_blocks + table.stats.idle_blocks) == (1, 64)
    assert table.turn(table.pause("abort")).finish.key == 3
    table.turn(table.request(4, C, 2))
    assert table.turn(table.resume()).starts == [4]
    table.run()
    assert table.finished[4].reason == "length"


# -- wait


@pytest.mark.parametrize("depth", [1, 2])
def test_wait_lets_what_runs_end_and_starts_nothing(depth):
    table = Table(pipeline_depth=depth, max_running=1)
    table.turn(table.request(1, A, 4), table.request(2, B, 4))
    table.turn(table.pause("wait"))
    assert not table.stats.paused
    starts = []
    while table.flying:
        # room for it is there all the time but the first
        turned = table.turn(table.done(), *([table.request(3, C, 4)] if len(starts) == 0 else []))
        starts += [turned.starts]
        if len(starts) > 1:
            assert turned.starts == []
    assert table.finished[1].reason == "length"
    assert len(table.finished[1].token_ids) == 4
    assert (table.stats.paused, table.stats.waiting, table.stats.running) == (True, 2, 0)
    assert not any(starts)
    assert table.turn(table.resume()).starts == [2]
    table.run()
    assert sorted(table.finished) == [1, 2, 3]


def test_wait_with_nothing_that_runs_is_a_pause_at_once():
    table = Table()
    assert table.turn(table.pause("wait"), table.request(1, A, 2)).steps == []
    assert table.stats.paused
    assert table.turn(table.resume()).starts == [1]
    table.run()


def test_wait_starts_those_again_that_lose_their_blocks_meanwhile():
    table = Table(num_blocks=8, decode_reserve_blocks=0)
    table.turn(table.request(1, range(4), 20), table.request(2, [50, 51], 22))
    table.turn(table.pause("wait"), table.request(3, C, 2))
    while table.flying:
        table.turn(table.done())
    assert table.stats.preemptions == 1
    assert [len(table.finished[key].token_ids) for key in (1, 2)] == [20, 22]
    assert 3 not in table.finished
    assert table.stats.paused
    table.run(table.resume())
    assert sorted(table.finished) == [1, 2, 3]


def test_wait_lets_those_end_that_were_preempted_before():
    table = Table(num_blocks=8, decode_reserve_blocks=0)
    table.turn(table.request(1, range(4), 20), table.request(2, [50, 51], 22))
    while not table.stats.preemptions:
        table.turn(table.done())
    table.turn(table.done())
    assert table.stats.waiting == 1
    table.turn(table.pause("wait"), table.request(3, C, 2))
    while table.flying:
        table.turn(table.done())
    assert sorted(table.finished) == [1, 2]
    assert table.stats.paused


def test_wait_lets_all_samples_of_a_request_that_has_begun_end():
    table = Table(max_running=1)
    samples = [table.request(key, A, 3, group=1, samples=2) for key in (1, 2)]
    table.turn(*samples, table.request(3, B, 3))
    assert table.stats.waiting == 2
    table.turn(table.pause("wait"))
    while table.flying:
        table.turn(table.done())
    assert sorted(table.finished) == [1, 2]
    assert table.stats.paused


@pytest.mark.parametrize("how", ["pause", "update"])
def test_a_request_has_begun_when_a_sample_of_it_has_ended(how):
    table = Table(max_running=1, pipeline_depth=1)
    table.turn(*[table.request(key, A, 1, group=1, samples=2) for key in (1, 2)], table.request(3, B, 3))
    if how == "pause":
        # events are read in order: the first sample has ended, and the second was never admitted
        table.turn(table.done(), table.pause("wait"))
        while table.flying:
            table.turn(table.done())
        assert sorted(table.finished) == [1, 2]
        return
    stop_steps(table)
    assert sorted(table.finished) == [1]
    begun_only = AbortRequested(keys=(2, 3), begun_only=True, at=table.now)
    table.turn(begun_only, table.weights(1), table.resume())
    assert table.finished[2].reason == "abort"
    # of the third one nobody has a token
    table.run()
    assert table.finished[3].reason == "length"


@pytest.mark.parametrize("step_tokens", [4, 16])
@pytest.mark.parametrize("running", [1, 8])
def test_an_update_that_aborts_ends_whole_requests(step_tokens, running):
    table = Table(max_running=running, max_step_tokens=step_tokens, pipeline_depth=1)
    samples = [table.request(key, A, 3, group=1, samples=3) for key in (1, 2, 3)]
    table.turn(*samples, *[table.request(key, B, 3, group=4, samples=2) for key in (4, 5)])
    stop_steps(table)
    begun_only = AbortRequested(keys=(1, 2, 3, 4, 5), begun_only=True, at=table.now)
    table.turn(begun_only, table.weights(1), table.resume())
    aborted = sorted(key for key, end in table.finished.items() if end.reason == "abort")
    assert aborted in ([1, 2, 3], [1, 2, 3, 4, 5])
    table.run()
    assert sorted(table.finished) == [1, 2, 3, 4, 5]
    assert all(len({span[1] for span in end.spans}) <= 1 for end in table.finished.values())


@pytest.mark.parametrize("how", ["abort", "deadline", "stop"])
def test_wait_is_over_however_the_last_one_ends(how):
    table = Table(pipeline_depth=1)
    table.turn(
        table.request(1, A, 30, deadline=9.0, checks_stops=True, emits=True), table.request(2, B, 2, priority=-1)
    )
    table.turn(table.done(), table.pause("wait"))
    while 2 not in table.finished:
        table.turn(table.done())
    assert not table.stats.paused
    ends = {"abort": table.abort(1), "deadline": table.timer(9.0), "stop": table.matched(1, 1)}
    assert table.turn(ends[how]).finish.reason == how
    assert table.stats.paused
    let_steps_end(table)
    assert table.is_empty()


def test_a_stronger_pause_takes_the_place_of_one_that_waits():
    table = Table()
    table.turn(table.request(1, A, 20))
    table.turn(table.pause("wait"), table.done())
    assert table.turn(table.pause(), table.done()).steps == []
    assert table.stats.paused
    # paused already: it starts nothing again
    assert table.turn(table.pause("wait")).steps == []
    assert table.stats.paused
    assert len(table.turn(table.resume()).steps) == 1
    table.run()


def test_resume_undoes_a_pause_that_still_waits():
    table = Table(max_running=2)
    table.turn(table.request(1, A, 20))
    table.turn(table.pause("wait"), table.request(2, B, 20))
    assert table.turn(table.done()).starts == []
    assert table.turn(table.resume()).starts == []
    assert table.turn(table.done()).starts == [2]
    table.run()
