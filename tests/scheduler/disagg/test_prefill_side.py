"""Finding room at other instances: whom the scheduler asks, when, and how often (docs/design.md,
section 6, rules 17, 19)."""

from __future__ import annotations

import pytest

from fdasync.events.actions import AskLease, GiveUpLease, HandOver
from fdasync.scheduler.disagg.prefill import PrefillSide
from tests.support.attached import attached
from tests.support.pd_table import PdTable, of, only

A = range(10)


def far(number, length=10):
    """A prompt that shares nothing with those of other numbers."""
    return range(1000 * number, 1000 * number + length)


def ask_all(table, count, decoders=("d0",), length=10):
    return table.turn(*[event for key in range(count) for event in table.hand_off(key, far(key, length), decoders)])


def asked(turned):
    return [(ask.group, ask.peer) for ask in of(turned, AskLease)]


# -- lease requests


def test_a_question_says_what_is_wanted_and_how_long_it_is():
    table = PdTable({"silent_s": 1.0, "find_s": 60.0, "total_s": 120.0, "ttl_s": 5.0})
    turned = table.turn(*table.hand_off(1, A))
    ask = only(turned, AskLease)
    assert (ask.group, ask.attempt, ask.peer) == (1, 0, "d0")
    assert ask.keys == tuple(table.keys(A))
    assert (ask.silent_by, ask.answer_by, ask.over_by, ask.ttl_s) == (2.0, 61.0, 121.0, 5.0)
    assert turned.steps == []
    assert table.stats.free_blocks == 64
    assert table.stats.hand_offs == 1


def test_no_block_is_held_before_the_grant_and_all_of_the_prompts_are_with_it():
    table = PdTable(max_step_tokens=8)
    table.turn(*table.hand_off(1, range(30)))
    assert table.stats.free_blocks == 64
    turned = table.turn(table.granted(1))
    assert turned.chunks == [(1, 8, False)]
    # the first chunk needs two of them
    assert table.stats.free_blocks == 64 - 8


def test_a_group_of_samples_asks_once_when_all_of_it_is_there():
    table = PdTable()
    first, second, third = table.hand_off(1, A, n=3)
    assert asked(table.turn(first, second)) == []
    assert asked(table.turn(third)) == [(1, "d0")]


def test_questions_are_bounded_for_one_instance():
    table = PdTable({"asks_per_peer": 2, "ahead_tokens": 10_000})
    assert asked(ask_all(table, 4)) == [(0, "d0"), (1, "d0")]
    assert asked(table.turn(table.granted(0))) == [(2, "d0")]
    # who is denied stands behind those who have not asked, only where it is younger
    assert asked(table.turn(table.denied(1))) == [(3, "d0")]


def test_questions_are_bounded_overall():
    table = PdTable({"asks": 3, "asks_per_peer": 2, "ahead_tokens": 10_000})
    events = [event for key in range(6) for event in table.hand_off(key, far(key), (f"d{key % 3}",))]
    assert asked(table.turn(*events)) == [(0, "d0"), (3, "d0"), (1, "d1")]
    # the oldest of those that may ask
    assert asked(table.turn(table.granted(0))) == [(2, "d2")]
    assert asked(table.turn(table.granted(1))) == [(4, "d1")]


def test_work_ahead_is_bounded_and_begun_work_does_not_count():
    table = PdTable({"ahead_tokens": 25}, max_step_tokens=16)
    assert asked(ask_all(table, 4)) == [(0, "d0"), (1, "d0")]
    # granted and begun in the same turn: 10 tokens are not ahead any more
    turned = table.turn(table.granted(0))
    assert turned.starts == [0]
    assert asked(turned) == [(2, "d0")]
    # there is no budget left in this step for the next one: it is leased and not begun
    table.turn(table.granted(1))
    assert asked(table.turn(table.granted(2))) == []
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 20
    turned = table.turn(table.done())
    assert turned.starts == [1, 2]
    assert asked(turned) == [(3, "d0")]
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0


def test_two_budgets_of_work_are_ahead_unless_said_otherwise():
    table = PdTable(max_step_tokens=16)
    assert asked(ask_all(table, 6)) == [(0, "d0"), (1, "d0"), (2, "d0")]


def test_one_request_may_always_lease_however_long():
    table = PdTable({"ahead_tokens": 8}, max_step_tokens=8)
    assert asked(ask_all(table, 2, length=100)) == [(0, "d0")]
    turned = table.turn(table.granted(0))
    assert turned.starts == [0]
    assert asked(turned) == [(1, "d0")]


def test_work_ahead_at_a_silent_instance_costs_the_others_nothing():
    table = PdTable({"ahead_tokens": 20, "asks_per_peer": 4})
    slow = [event for key in range(4) for event in table.hand_off(key, far(key), ("dead",))]
    quick = [event for key in range(4, 6) for event in table.hand_off(key, far(key), ("d1",))]
    assert asked(table.turn(*slow, *quick)) == [(0, "dead"), (1, "dead"), (4, "d1"), (5, "d1")]
    turned = table.turn(table.granted(4))
    assert turned.starts == [4]
    # and whoever comes later
    table = PdTable({"ahead_tokens": 20, "asks_per_peer": 4})
    table.turn(*slow)
    assert asked(table.turn(*quick)) == [(4, "d1"), (5, "d1")]


def unbegun(table):
    """Tokens that are leased and not begun."""
    return sum(
        hand_off.tokens for hand_off in attached(table.scheduler, PrefillSide)._granted.values() if not hand_off.begun
    )


def busy(rules):
    """Nothing can begin on it before request 900 has ended."""
    table = PdTable({"asks_per_peer": 8, **rules}, num_blocks=8, max_step_tokens=64)
    table.turn(table.request(900, far(90, 24), 8))
    return table


def test_instances_that_answer_at_once_may_each_grant_what_may_be_ahead():
    table = busy({"ahead_tokens": 20})
    events = [event for key in range(12) for event in table.hand_off(key, far(key), (f"d{key % 4}",))]
    # nobody has answered anything yet: a silent one must not hold the others up
    assert len(asked(table.turn(*events))) == 8
    table.now += 1
    # the youngest are granted first
    turned = [table.turn(table.granted(group)) for group in reversed(range(8))]
    # what was granted counts at all of them: none is asked for more
    assert (unbegun(table), [asked(turn) for turn in turned]) == (80, [[]] * 8)
    assert table.given_up == []
    for _ in range(200):
        if len(table.finished) == 13:
            break
        table.now += 0.02
        answers = [table.granted(group) for group, _ in list(table.asks)]
        steps = [table.done()] if table.flying else []
        copies = [table.copied() for _ in list(table.copies)]
        taken = [table.sent() for _ in list(table.offers)] + [table.handed() for _ in list(table.hands)]
        table.turn(*answers, *steps, *copies, *taken, table.timer(table.now))
        assert unbegun(table) <= 80
    assert {table.finished[key].reason for key in range(12)} == {"handed_over"}
    assert table.is_empty()


def test_a_silent_instance_is_probed_one_question_at_a_time():
    table = PdTable({"asks_per_peer": 8, "ahead_tokens": 10_000})
    ask_all(table, 3)
    table.now += 1
    table.turn(*[table.silent(group) for group in range(3)])
    assert table.asks == {}
    table.now += 1
    turned = table.turn(table.timer(table.now))
    assert asked(turned) == [(0, "d0")]
    # it answers something: it is asked as before
    assert asked(table.turn(table.granted(0))) == [(1, "d0"), (2, "d0")]


# -- failing over


def test_a_denied_request_asks_the_next_instance_at_once():
    table = PdTable()
    table.turn(*table.hand_off(1, A, ("d0", "d1", "d2")))
    assert asked(table.turn(table.denied(1, 0.2))) == [(1, "d1")]
    assert asked(table.turn(table.silent(1))) == [(1, "d2")]
    assert list(table.asks) == [(1, 2)]


def test_a_request_that_all_denied_waits_before_the_next_round():
    table = PdTable()
    table.turn(*table.hand_off(1, A, ("d0", "d1")))
    table.turn(table.denied(1))
    turned = table.turn(table.denied(1))
    assert asked(turned) == []
    (wake,) = turned.wakes
    assert wake.time == pytest.approx(1.1)
    assert asked(table.turn(table.timer(1.05))) == []
    table.now = 1.11
    assert asked(table.turn(table.timer(1.11))) == [(1, "d0")]


def test_pauses_between_rounds_grow_up_to_a_second():
    table = PdTable()
    table.turn(*table.hand_off(1, A))
    pauses = []
    for _ in range(7):
        began = table.now
        table.turn(table.denied(1))
        while not table.asks:
            table.now += 0.05
            table.turn(table.timer(table.now))
        pauses.append(round(table.now - began, 2))
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.1, abs=0.06)
    assert pauses[-1] == pytest.approx(1.0, abs=0.06)


def test_the_hint_of_a_denial_is_kept_to():
    table = PdTable()
    table.turn(*table.hand_off(1, A))
    turned = table.turn(table.denied(1, 3.0))
    assert turned.wakes[-1].time == pytest.approx(4.0)
    assert asked(table.turn(table.timer(3.9))) == []
    table.now = 4.0
    assert asked(table.turn(table.timer(4.0))) == [(1, "d0")]


def test_an_instance_that_will_never_have_room_is_not_asked_again():
    table = PdTable()
    table.turn(*table.hand_off(1, A, ("d0", "d1")))
    assert asked(table.turn(table.denied(1, -1.0))) == [(1, "d1")]
    table.turn(table.denied(1))
    table.now += 1
    assert asked(table.turn(table.timer(table.now))) == [(1, "d1")]
    turned = table.turn(table.denied(1, -1.0, "too big"))
    assert (turned.finish.reason, turned.finish.note) == (
        "never_lease",
        "no instance can ever have room for it; d0: no; d1: too big",
    )
    assert of(turned, GiveUpLease) == []
    assert table.is_empty()


def test_no_instance_is_looked_for_longer_than_that():
    table = PdTable({"find_s": 2.0})
    table.turn(*table.hand_off(1, A, n=2))
    table.turn(table.denied(1))
    table.now = 3.0
    turned = table.turn(table.timer(3.0))
    assert [(end.key, end.reason) for end in turned.finishes] == [(1, "no_lease"), (2, "no_lease")]
    assert "within 2 s" in turned.finishes[0].note
    assert table.is_empty()


def test_the_end_of_a_search_says_what_each_instance_said_last():
    table = PdTable({"find_s": 2.0})
    table.turn(*table.hand_off(1, A, ("d0", "d1", "d2", "d3")))
    table.turn(table.denied(1, 0.2, "it is full"))
    table.turn(table.denied(1, -1.0, "9 KV blocks are needed, it has 8"))
    table.turn(table.denied(1, 0.2, "it has other weights"))
    table.turn(table.silent(1))
    table.now = 2.0
    table.turn(table.timer(2.0))
    table.turn(table.denied(1, 0.2, "it has other weights"))
    table.turn(table.denied(1, 0.2, "it has other weights"))
    table.turn(table.silent(1))
    table.now = 3.0
    turned = table.turn(table.timer(3.0))
    assert turned.finish.note == (
        "no instance had room for it within 2 s; d1: 9 KV blocks are needed, it has 8; "
        "d0, d2: it has other weights; d3: silence"
    )


@pytest.mark.parametrize("late", [True, False])
def test_an_answer_at_the_end_of_the_search_is_told_too(late):
    table = PdTable({"find_s": 2.0})
    table.turn(*table.hand_off(1, A, ("d0",)))
    table.now = 3.0
    events = [table.denied(1, 0.2, "w" * 5000), table.timer(3.0)]
    turned = table.turn(*(events if late else reversed(events)))
    assert turned.finish.note == "no instance had room for it within 2 s; d0: " + "w" * 300


def test_the_end_of_the_search_and_of_a_pause_in_one_turn_ask_no_instance():
    table = PdTable({"find_s": 2.0})
    table.turn(*table.hand_off(1, A))
    table.now = 2.9
    # the pause is cut at the end of the search
    table.turn(table.denied(1, 5.0))
    table.now = 3.0
    turned = table.turn(table.timer(3.0))
    assert turned.finish.reason == "no_lease"
    assert asked(turned) == []
    assert of(turned, GiveUpLease) == []
    assert table.is_empty()


def test_a_request_that_waits_for_others_questions_is_not_looked_for_longer_either():
    table = PdTable({"find_s": 2.0, "asks_per_peer": 1, "ahead_tokens": 1000})
    ask_all(table, 2)
    table.now = 3.0
    # the place in line comes free in the very turn in which the search ends
    turned = table.turn(table.timer(3.0), table.denied(0))
    assert sorted(end.key for end in turned.finishes) == [0, 1]
    assert asked(turned) == []
    assert table.is_empty()


def test_with_other_instances_to_ask_no_request_stands_in_line_for_long():
    table = PdTable({"queue_s": 5.0, "find_s": 60.0})
    table.turn(*table.hand_off(1, A, ("d0", "d1")), *table.hand_off(2, far(2), ("d0",)))
    assert table.asks[1, 0].answer_by == 6.0
    assert table.asks[2, 0].answer_by == 61.0
    # the last one that may ever have room is waited for as long as there is time
    table.turn(table.denied(1, -1.0))
    assert table.asks[1, 1].answer_by == 61.0


def test_a_request_that_asked_all_stays_in_the_line_where_it_stands():
    """Else a large request would begin anew at every instance in turn, and be passed for ever."""
    table = PdTable({"queue_s": 5.0, "find_s": 60.0})
    table.turn(*table.hand_off(1, A, ("d0", "d1")))
    assert table.asks[1, 0].answer_by == 6.0
    table.now = 6.0
    table.turn(table.denied(1))
    assert (table.asks[1, 1].peer, table.asks[1, 1].answer_by) == ("d1", 11.0)
    table.now = 11.0
    table.turn(table.denied(1))
    table.now = 12.5
    table.turn(table.timer(12.5))
    assert (table.asks[1, 2].peer, table.asks[1, 2].answer_by) == ("d0", 61.0)


def test_a_request_with_a_deadline_is_not_looked_for_longer():
    table = PdTable({"find_s": 60.0})
    table.turn(*table.hand_off(1, A, deadline=4.0))
    ask = table.asks[1, 0]
    assert ask.answer_by == 4.0
    assert ask.silent_by == 2.0


# -- giving up


def test_an_abort_while_it_asks_tells_the_other_side():
    table = PdTable()
    table.turn(*table.hand_off(1, A, n=2))
    turned = table.turn(table.abort(1, 2))
    assert [end.reason for end in turned.finishes] == ["abort", "abort"]
    assert only(turned, GiveUpLease) == GiveUpLease(1, 0, "d0", "abort")
    # what comes after that is nobody's
    table.turn(table.denied(1))
    assert table.is_empty()


def test_a_grant_that_comes_after_the_end_changes_nothing():
    table = PdTable()
    table.turn(*table.hand_off(1, A))
    table.turn(table.abort(1))
    turned = table.turn(table.granted(1))
    assert turned.steps == []
    assert table.is_empty()


def test_a_deadline_while_it_asks_and_while_it_pauses():
    table = PdTable()
    table.turn(*table.hand_off(1, A, deadline=2.0), *table.hand_off(2, far(2), deadline=2.0))
    table.turn(table.denied(2))
    table.now = 2.0
    turned = table.turn(table.timer(2.0))
    assert [(end.key, end.reason) for end in turned.finishes] == [(1, "deadline"), (2, "deadline")]
    assert of(turned, GiveUpLease) == [GiveUpLease(1, 0, "d0", "deadline")]
    table.turn(table.denied(1))
    assert table.is_empty()


def test_an_abort_while_it_waits_to_ask():
    table = PdTable({"asks_per_peer": 1})
    ask_all(table, 2)
    turned = table.turn(table.abort(1))
    assert of(turned, GiveUpLease) == []
    assert asked(table.turn(table.granted(0))) == []
    assert table.stats.hand_offs == 1


def test_one_sample_of_a_group_may_leave_while_it_asks():
    table = PdTable()
    table.turn(*table.hand_off(1, A, n=2))
    turned = table.turn(table.abort(1))
    assert of(turned, GiveUpLease) == []
    assert table.turn(table.granted(1)).starts == [2]
    table.work()
    assert [sent.indices for sent in table.offers.values()] == [(0, 1)]
    assert [hand.key for hand in table.hands.values()] == [2]
    table.turn(table.sent(), table.handed())
    assert table.finished[2].reason == "handed_over"
    # the other side still waits for the first one
    assert table.given_up == [GiveUpLease(1, 0, "d0")]
    assert table.is_empty()


def test_a_pause_asks_for_nothing_and_ends_nothing():
    table = PdTable()
    table.turn(table.pause(), *table.hand_off(1, A), *table.hand_off(2, far(2)))
    assert table.asks == {}
    assert asked(table.turn(table.resume())) == [(1, "d0"), (2, "d0")]
    turned = table.turn(table.pause(), table.granted(1))
    assert turned.steps == []
    assert table.stats.hand_offs == 2
    assert table.turn(table.resume()).starts == [1]


def test_new_weights_while_it_asks():
    table = PdTable(namespace=b"weights 0")
    table.turn(*table.hand_off(1, A))
    turned = table.turn(table.pause(), table.weights(1), table.resume())
    assert only(turned, GiveUpLease) == GiveUpLease(1, 0, "d0")
    # it is asked for again under its new identities
    assert asked(turned) == []
    turned = table.turn(table.hashed(), table.denied(1))
    ask = only(turned, AskLease)
    assert (ask.attempt, ask.namespace) == (1, b"weights 1")
    assert ask.keys == tuple(table.keys(A))
    table.turn(table.granted(1))
    table.work()
    table.turn(table.sent(), table.handed())
    assert table.is_empty()


def test_a_request_that_is_hashed_again_holds_up_no_other():
    table = PdTable(namespace=b"weights 0")
    table.turn(*table.hand_off(1, A))
    table.turn(table.weights(1))
    turned = table.turn(*table.hand_off(2, far(2)))
    assert asked(turned) == [(2, "d0")]


def test_a_first_token_alone_is_handed_over():
    table = PdTable()
    table.turn(*table.hand_off(1, range(3)))
    table.turn(table.granted(1))
    table.turn(table.done(77))
    table.turn(table.copied())
    (hand,) = table.hands.values()
    assert hand == HandOver(0, 1, 0, "d0", 1, 0, 77, 0, 3, hand.host, hand.slot, hand.generation, (0, 0, 0))
    turned = table.turn(table.handed())
    assert (turned.finish.reason, turned.finish.token_ids) == ("handed_over", (77,))
    assert of(turned, GiveUpLease) == []
    assert table.is_empty()
