"""Pauses of instances that prefill and decode for each other: nothing hangs, and nothing is lost (rule 36)."""

from __future__ import annotations

import pytest

from fdasync.events.actions import AnswerLease, AskLease, DropLease, GiveUpLease, HandOver
from tests.support.pd_table import PdTable, of, only

A, B = range(10), range(500, 510)
RULES = {"find_s": 10.0, "total_s": 20.0, "ttl_s": 1000.0, "max_ttl_s": 1000.0, "ahead_tokens": 1000}


def asked(turned):
    return [(ask.group, ask.attempt) for ask in of(turned, AskLease)]


# -- the prefill side


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("when", ["looking", "asked", "granted"])
def test_a_pause_takes_no_time_from_the_search_nor_from_the_lease(mode, when):
    table = PdTable(RULES, max_step_tokens=4)
    table.turn(*table.hand_off(1, A))
    if when == "granted":
        table.turn(table.granted(1))
    elif when == "looking":
        table.turn(table.denied(1, retry_after_s=5.0))
    table.now = 3.0
    table.turn(table.pause(mode))
    table.work()
    for table.now in (15.0, 30.0, 45.0):
        assert table.turn(table.timer(table.now)).finishes == []
    if when == "asked":
        # the answer that was given up comes while it is paused, and late
        assert table.turn(table.denied(1)).finishes == []
    turned = table.turn(table.resume())
    if when != "granted":
        if not table.asks:
            table.now += 1.0
            turned = table.turn(table.timer(table.now))
        assert asked(turned) == [(1, 1)]
        turned = table.turn(table.granted(1))
    table.work()
    while table.offers:
        table.turn(table.sent())
        table.work()
    table.turn(table.handed())
    assert table.finished[1].reason == "handed_over"
    table.turn()
    assert table.is_empty()


def test_the_search_and_the_lease_end_in_time_after_a_pause():
    table = PdTable(RULES, max_step_tokens=4)
    table.turn(*table.hand_off(1, A), *table.hand_off(2, B))
    table.turn(table.granted(1))
    table.now = 3.0
    table.turn(table.pause())
    table.now = 103.0
    table.turn(table.resume())
    # of the search eight seconds are left, of the lease eighteen
    table.now = 110.5
    assert table.turn(table.timer(110.5), table.denied(2)).finishes == []
    table.now = 110.9
    assert asked(table.turn(table.timer(110.9))) == [(2, 1)]
    table.now = 111.5
    turned = table.turn(table.denied(2))
    assert (turned.finish.key, turned.finish.reason) == (2, "no_lease")
    table.now = 120.5
    assert of(table.turn(table.timer(120.5)), GiveUpLease) == []
    table.now = 121.5
    assert only(table.turn(table.timer(121.5)), GiveUpLease).group == 1


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_what_is_being_handed_over_stays_in_a_retract_and_ends_in_an_abort(mode):
    table = PdTable(RULES)
    table.turn(*table.hand_off(1, A))
    table.turn(table.granted(1))
    table.work()
    assert (len(table.offers), len(table.hands)) == (1, 1)
    turned = table.turn(table.pause(mode))
    if mode == "abort":
        assert turned.finish.reason == "abort"
        assert only(turned, GiveUpLease).group == 1
        table.turn(*table.ends_of(1, 0))
    else:
        assert turned.finishes == []
        table.turn(table.sent(), table.handed())
        assert table.finished[1].reason == "handed_over"
    assert table.is_empty()


def test_a_wait_hands_over_what_was_granted_and_takes_other_questions_back():
    table = PdTable(RULES, max_step_tokens=4)
    table.turn(*table.hand_off(1, A, n=2), *table.hand_off(3, B))
    table.turn(table.granted(1))
    turned = table.turn(table.pause("wait"))
    assert [give.group for give in of(turned, GiveUpLease)] == [3]
    # one that comes now asks nobody
    assert asked(table.turn(*table.hand_off(5, range(900, 910)))) == []
    # the answer crossed the question that was taken back
    assert table.turn(table.granted(3)).finishes == []
    table.work()
    while table.offers or table.hands:
        assert not table.stats.paused
        table.turn(*([table.sent()] if table.offers else [table.handed()]))
        table.work()
    assert [table.finished[key].reason for key in (1, 2)] == ["handed_over"] * 2
    assert table.stats.paused
    table.now = 50.0
    assert table.turn(table.timer(50.0)).finishes == []
    assert asked(table.turn(table.resume())) == [(3, 1), (5, 0)]


def test_a_wait_looks_for_another_lease_for_what_has_begun():
    table = PdTable(RULES, max_step_tokens=4)
    table.turn(*table.hand_off(1, A, decoders=("d0", "d1")))
    table.turn(table.granted(1))
    table.turn(table.pause("wait"), table.done())
    turned = table.turn(*table.lost(1, 0))
    assert only(turned, AskLease).peer == "d1"
    table.turn(table.granted(1))
    table.work()
    assert of(table.turn(), HandOver) == []
    while table.offers:
        table.turn(table.sent())
        table.work()
    table.turn(table.handed())
    assert (table.finished[1].reason, table.stats.paused) == ("handed_over", True)


# -- the decode side


def test_a_lease_lasts_as_long_as_a_pause_of_its_side():
    table = PdTable(RULES)
    table.turn(table.lease(1, A, ttl_s=1000.0, total_s=20.0))
    table.now = 5.0
    table.turn(table.pause())
    table.now = 100.0
    table.turn(table.timer(100.0))
    assert table.dropped == []
    table.turn(table.resume())
    table.now = 115.0
    table.turn(table.timer(115.0))
    assert table.dropped == []
    table.now = 117.0
    table.turn(table.timer(117.0))
    assert [drop.group for drop in table.dropped] == [1]
    assert table.is_empty()


def test_a_lease_that_nobody_renews_ends_while_paused():
    table = PdTable({"ttl_s": 5.0})
    table.turn(table.lease(1, A, ttl_s=5.0))
    table.turn(table.pause())
    table.now = 10.0
    table.turn(table.timer(10.0))
    assert [drop.group for drop in table.dropped] == [1]


def test_a_wait_lets_granted_leases_be_used_and_grants_none():
    table = PdTable(RULES)
    turned = table.turn(table.lease(1, A, 3))
    assert only(turned, AnswerLease).verdict == "granted"
    table.turn(table.pause("wait"))
    assert not table.stats.paused
    # there is room for it
    assert [answer.verdict for answer in of(table.turn(table.lease(2, B, 3)), AnswerLease)] == ["queued"]
    table.arrive(1, A)
    answers = []
    while table.flying or table.copies:
        assert answers == []
        done = [table.done()] if table.flying else []
        answers = of(table.turn(*done, *[table.copied() for _ in range(len(table.copies))]), AnswerLease)
    assert table.finished[1].reason == "length"
    # in the turn in which the last sample ends, and with it the wait
    assert table.stats.paused
    assert [(answer.group, answer.verdict) for answer in answers] == [(2, "granted")]


def test_a_pause_that_waits_for_nothing_or_for_a_lease_that_is_given_up_grants_the_next_at_once():
    table = PdTable(RULES)
    turned = table.turn(table.pause("wait"), table.lease(1, A, 3))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]
    table = PdTable({**RULES, "beyond_running": 0}, max_running=2)
    table.turn(table.lease(1, A, 3))
    table.turn(table.lease(2, B, 3, n=2))
    table.turn(table.pause("wait"))
    turned = table.turn(table.gives_up(1))
    assert [(answer.group, answer.verdict) for answer in of(turned, AnswerLease)] == [(2, "granted")]


def test_a_wait_is_over_when_a_granted_lease_is_given_up():
    table = PdTable(RULES)
    table.turn(table.lease(1, A, 3))
    table.turn(table.pause("wait"))
    table.turn(table.gives_up(1))
    assert (table.finished[1].reason, table.stats.paused) == ("lease_lost", True)


def test_a_retract_leaves_leases_and_what_was_handed_over_starts_again():
    table = PdTable(RULES)
    table.turn(table.lease(1, A, 3), table.lease(2, B, 3))
    table.arrive(1, A)
    table.turn(table.pause("retract"))
    while table.flying:
        table.turn(table.done())
    assert (table.stats.running, table.stats.waiting, table.stats.leased) == (0, 1, 1)
    # its full blocks stay as cache
    assert table.turn(table.resume()).cached == {1: 8}
    table.arrive(2, B)
    table.run()
    assert [table.finished[key].reason for key in (1, 2)] == ["length"] * 2
    assert [len(table.finished[key].token_ids) for key in (1, 2)] == [3, 3]
    assert table.is_empty()


def test_an_abort_ends_leased_samples_and_tells_the_other_side():
    table = PdTable(RULES, num_blocks=4)
    table.turn(table.lease(1, A, 3), table.lease(2, B, 3))
    turned = table.turn(table.pause("abort"))
    assert [(end.key, end.reason) for end in turned.finishes] == [(1, "abort"), (2, "abort")]
    assert [(drop.group, drop.ended) for drop in table.dropped] == [(1, True), (2, True)]
    assert table.is_empty()


# -- the decode side asleep


def test_a_side_that_sleeps_grants_leases_when_it_goes_on():
    table = PdTable(RULES)
    table.turn(table.sleep())
    # there is room for it, and another program has the memory
    assert only(table.turn(table.lease(1, A, 3)), AnswerLease).verdict == "queued"
    # another sleep before anything was woken
    table.turn(table.sleep())
    assert table.stats.reserved_blocks == 0
    assert only(table.turn(table.resume()), AnswerLease).verdict == "granted"
    table.arrive(1, A)
    table.run()
    assert table.finished[1].reason == "length"
    assert table.is_empty()


def test_a_side_that_falls_asleep_grants_no_lease_that_it_would_drop():
    table = PdTable(RULES)
    table.turn(table.request(9, B))
    table.turn(table.sleep())
    # the step in flight ends first
    turned = table.turn(table.lease(1, A, 3))
    assert only(turned, AnswerLease).verdict == "queued"
    turned = table.turn(table.done())
    assert only(turned, DropLease).group == turned.finish.key == 1
