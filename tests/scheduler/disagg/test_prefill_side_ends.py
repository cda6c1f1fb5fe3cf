"""Hand-overs that come to nothing: lost leases, aborts, deadlines, new weights, preemption (docs/design.md,
section 6)."""

from __future__ import annotations

from fdasync.events.actions import AskLease, GiveUpLease, HandOver, SendBlocks
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.scheduler.state.sequence import State
from tests.scheduler.table import span
from tests.support.attached import attached
from tests.support.pd_table import PdTable, begin, leave_on_host, of, only, sent_indices

# -- a lease is lost


def test_a_lease_lost_before_it_begins_is_sought_anew():
    table = PdTable(max_step_tokens=8, num_blocks=4)
    table.turn(table.request(9, range(500, 512), 4))
    table.turn(*table.hand_off(1, range(10), ("d0", "d1")))
    assert table.turn(table.granted(1)).starts == []
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 10
    turned = table.turn(*table.lost(1, 0))
    ask = only(turned, AskLease)
    assert (ask.attempt, ask.peer) == (1, "d1")
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0
    table.turn(table.granted(1))
    while 9 not in table.finished:
        table.turn(table.done())
    table.work()
    assert sent_indices(table) == [0, 1]


def test_what_was_computed_is_sent_to_the_next_one():
    table = PdTable(max_step_tokens=8)
    begin(table, 1, range(18), ("d0", "d1"))
    table.turn(table.done())
    table.turn(table.copied())
    assert sent_indices(table) == [0, 1]
    turned = table.turn(*table.lost(1, 0))
    assert only(turned, AskLease).peer == "d1"
    # it goes on computing meanwhile
    turned = table.turn(table.done())
    assert turned.chunks == [(1, 2, True)]
    table.work()
    assert (table.offers, table.hands) == ({}, {})
    table.turn(table.granted(1, 1))
    table.work()
    assert {(sent.peer, sent.attempt) for sent in table.offers.values()} == {("d1", 1)}
    assert sent_indices(table) == [1, 2, 3]
    (hand,) = table.hands.values()
    assert (hand.peer, hand.attempt, hand.tail_rows) == ("d1", 1, 2)
    table.turn(*[table.sent() for _ in list(table.offers)], table.handed())
    assert table.finished[1].reason == "handed_over"
    assert table.stats.preemptions == 0
    assert table.is_empty()


def test_a_lease_that_comes_while_the_last_chunk_computes_waits_for_the_token():
    for length in (9, 8, 3):
        table = PdTable()
        begin(table, 1, range(length), ("d0", "d1"))
        assert table.scheduler.sequences[1].state is State.TAIL
        table.turn(*table.lost(1, 0))
        turned = table.turn(table.granted(1))
        # the open block is still being written
        assert turned.outs == []
        assert table.hands == {}
        table.turn(table.done(55))
        table.work()
        (hand,) = table.hands.values()
        assert (hand.token, hand.peer) == (55, "d1")
        table.turn(*[table.sent() for _ in list(table.offers)], table.handed())
        assert table.is_empty()


def test_work_ahead_is_counted_once_however_often_a_lease_is_lost():
    table = PdTable()
    leave_on_host(table, range(9))
    begin(table, 1, range(9), ("d0", "d1"))
    # it waits for its hits to come to the device
    assert table.scheduler.sequences[1].state is State.LOADING
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 9
    table.turn(*table.lost(1, 0))
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0
    assert table.turn(table.copied()).starts == [1]
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0
    table.turn(table.granted(1))
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0
    table.work()
    table.turn(table.sent(), table.handed())
    assert table.is_empty()


def test_after_a_hand_over_was_sent_a_lost_lease_ends_it():
    table = PdTable()
    begin(table, 1, range(10), ("d0", "d1"), n=2)
    table.work()
    turned = table.turn(*table.lost(1, 0, "it died"))
    assert [(end.key, end.reason, end.note, end.token_ids) for end in turned.finishes] == [
        (1, "no_lease", "d0: it died", ()),
        (2, "no_lease", "d0: it died", ()),
    ]
    assert of(turned, AskLease) == []
    assert table.is_empty()


def test_a_hand_over_that_is_refused_ends_it():
    table = PdTable()
    begin(table, 1, range(10), ("d0", "d1"))
    table.work()
    turned = table.turn(table.handed(taken=False))
    assert turned.finish.reason == "no_lease"
    # nothing more is sent after that
    assert of(turned, SendBlocks) == of(turned, HandOver) == []
    assert of(turned, GiveUpLease) == [GiveUpLease(1, 0, "d0")]
    table.turn(*table.ends_of(1, 0))
    assert table.is_empty()


def test_a_lease_that_lasts_too_long_is_over():
    table = PdTable({"total_s": 10.0})
    begin(table, 1, range(10), ("d0", "d1"))
    table.now = 11.0
    turned = table.turn(table.timer(11.0))
    assert of(turned, GiveUpLease) == [GiveUpLease(1, 0, "d0")]
    assert only(turned, AskLease).peer == "d1"


def test_a_search_begins_anew_with_the_loss_of_a_lease():
    table = PdTable({"find_s": 5.0})
    begin(table, 1, range(10), ("d0", "d1"))
    table.now = 30.0
    turned = table.turn(*table.lost(1, 0))
    ask = only(turned, AskLease)
    assert (ask.silent_by, ask.answer_by) == (31.0, 35.0)
    table.turn(table.denied(1))
    table.now = 35.0
    assert table.turn(table.timer(35.0)).finish.reason == "no_lease"


# -- ends


def test_an_abort_and_a_deadline_at_every_stage_hold_nothing():
    for stage in range(8):
        for deadline in (False, True):
            table = PdTable(max_step_tokens=8)
            fields = {"deadline": 50.0} if deadline else {}
            table.turn(*table.hand_off(1, range(18), n=2, **fields))
            table.turn(table.granted(1))
            for _ in range(stage):
                table.turn(*([table.done()] if table.flying else []), *[table.copied() for _ in list(table.copies)])
            table.now = 50.0
            turned = table.turn(table.timer(50.0) if deadline else table.abort(1, 2))
            reason = "deadline" if deadline else "abort"
            assert [end.reason for end in turned.finishes] == [reason] * 2
            assert of(turned, GiveUpLease) == [GiveUpLease(1, 0, "d0", reason)]
            table.turn(*table.ends_of(1, 0))
            table.work()
            assert table.is_empty()


def test_blocks_that_are_read_stay_until_their_reading_ended():
    table = PdTable()
    begin(table, 1, range(10))
    table.work()
    (sent,) = table.offers.values()
    (hand,) = table.hands.values()
    table.turn(table.abort(1))
    index = table.scheduler.index
    held = {block.host for block in index.pool.live() if block.host_holds}
    assert held == {*sent.host, hand.host}
    table.turn(table.sent(taken=False))
    assert {block.host for block in index.pool.live() if block.host_holds} == {hand.host}
    table.turn(table.handed(taken=False))
    assert table.is_empty()


def test_new_weights_start_it_anew_unless_its_hand_over_was_sent():
    table = PdTable(namespace=b"weights 0", max_step_tokens=32)
    begin(table, 1, range(10), ("d0", "d1"))
    begin(table, 2, range(100, 110), ("d0", "d1"))
    table.work()
    table.turn(table.sent(), *[table.handed(offer) for offer, hand in list(table.hands.items()) if hand.key == 1])
    begin(table, 3, range(200, 210), ("d0", "d1"))
    table.turn(table.done())
    turned = table.turn(table.pause(), table.weights(1), table.resume())
    assert [(end.key, end.reason) for end in turned.finishes] == [(2, "no_lease")]
    assert sorted((give.group, give.attempt) for give in of(turned, GiveUpLease)) == [(2, 0), (3, 0)]
    table.turn(*table.ends_of(2, 0), *table.ends_of(3, 0), *[table.hashed() for _ in list(table.hashes)])
    assert list(table.asks) == [(3, 1)]
    turned = table.turn(table.granted(3))
    # nothing computed before may be used
    assert turned.cached == {3: 0}
    table.work()
    assert sent_indices(table) == [0, 1]
    table.turn(table.sent(), table.handed())
    assert table.finished[3].reason == "handed_over"
    assert table.finished[3].spans == (span(0, "1"),)
    assert table.is_empty()


def test_a_request_that_is_preempted_while_its_blocks_wait_for_the_host_sends_them_all_the_same():
    table = PdTable(num_blocks=7, num_host_blocks=1, max_step_tokens=8, decode_reserve_blocks=0)
    # the only host block is read by another instance for long
    begin(table, 8, range(800, 804))
    table.work()
    table.turn(table.handed())
    table.turn(table.request(9, range(900, 907), 20))
    begin(table, 1, range(18))
    while 9 not in table.finished:
        table.turn(table.done())
    assert table.stats.preemptions > 0
    assert sent_indices(table) == [0]
    # what it had computed was evicted meanwhile
    assert table.stats.evictions > 0
    table.turn(table.sent())
    for _ in range(50):
        table.work()
        if 1 in table.finished:
            break
        table.turn(*[table.sent() for _ in list(table.offers)], *[table.handed() for _ in list(table.hands)])
    assert table.finished[1].reason == "handed_over"
    table.turn(*[table.sent() for _ in list(table.offers)])
    assert table.is_empty()


def test_blocks_that_are_on_the_host_already_are_sent_with_the_grant():
    table = PdTable()
    begin(table, 1, range(9), ("d0", "d1"))
    table.turn(table.done())
    table.turn(*table.lost(1, 0))
    table.work()
    assert table.places(range(9)) == ["both", "both"]
    # nothing else may happen for long
    turned = table.turn(table.granted(1))
    assert only(turned, SendBlocks).indices == (0, 1)
    table.work()
    table.turn(table.sent(), table.handed())
    assert table.is_empty()


# -- words about an earlier attempt


def test_the_answer_to_an_earlier_question_is_none_to_the_one_that_is_out():
    table = PdTable(namespace=b"weights 0")
    table.turn(*table.hand_off(1, range(10), ("d0", "d1")))
    table.turn(table.pause(), table.weights(1), table.resume())
    table.turn(table.hashed())
    assert sorted(table.asks) == [(1, 0), (1, 1)]
    # what d0 grants now was given up
    turned = table.turn(table.granted(1))
    assert turned.starts == []
    assert attached(table.scheduler, PrefillSide)._leased_tokens == 0
    assert list(table.asks) == [(1, 1)]
    assert table.turn(table.granted(1)).starts == [1]
    table.work()
    table.turn(table.sent(), table.handed())
    assert table.is_empty()


def test_the_loss_of_an_earlier_lease_is_none_of_the_one_that_holds():
    table = PdTable({"total_s": 10.0}, max_step_tokens=8)
    begin(table, 1, range(18), ("d0", "d1"))
    table.now = 11.0
    # the first lease lasted too long, another one is found
    table.turn(table.timer(11.0))
    table.turn(table.granted(1))
    turned = table.turn(*table.lost(1, 0))
    assert of(turned, GiveUpLease) == of(turned, AskLease) == []
    while not table.hands:
        table.turn(*([table.done()] if table.flying else []), *[table.copied() for _ in list(table.copies)])
    table.turn(*[table.sent() for _ in list(table.offers)], table.handed())
    assert table.finished[1].reason == "handed_over"
    assert table.is_empty()


def test_nothing_is_begun_again_after_all_its_time():
    table = PdTable({"find_s": 5.0, "total_s": 20.0})
    begin(table, 1, range(10), ("d0", "d1"))
    table.now = 20.9
    table.turn(*table.lost(1, 0))
    table.turn(table.granted(1))
    table.now = 21.0
    turned = table.turn(*table.lost(1, 1))
    assert (turned.finish.reason, turned.finish.note) == (
        "no_lease",
        "d1: its lease was lost, and it was not handed over before",
    )
    assert of(turned, AskLease) == []
    table.work()
    assert table.is_empty()
