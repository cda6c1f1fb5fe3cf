"""Blocks and hand-overs on their way to another instance (docs/design.md, section 6, rules 18, 20)."""

from __future__ import annotations

from fdasync.events.actions import AskLease, GiveUpLease, HandOver, SendBlocks
from tests.support.pd_table import PdTable, begin, leave_on_host, of, only, sent_indices

# -- blocks


def test_blocks_go_as_they_seal_while_later_chunks_compute():
    table = PdTable(max_step_tokens=8)
    begin(table, 1, range(22))
    turned = table.turn(table.done())
    assert turned.chunks == [(1, 8, False)]
    (out,) = turned.outs
    assert len(out.device) == 2
    turned = table.turn(table.copied())
    sent = only(turned, SendBlocks)
    assert (sent.offer, sent.group, sent.attempt, sent.peer, sent.indices) == (0, 1, 0, "d0", (0, 1))
    assert sent.host == out.host
    assert len(sent.slots) == 2
    assert table.flying
    table.work()
    assert [sent.indices for sent in table.offers.values()] == [(0, 1), (2, 3), (4,)]
    assert [hand.tail for hand in table.hands.values()] == [5]


def test_the_hand_over_closes_after_every_block_was_offered():
    table = PdTable({"staging_blocks": 2})
    begin(table, 1, range(15))
    table.work()
    # a ring of two, one of them for one instance
    assert sent_indices(table) == [0]
    assert table.hands == {}
    table.turn(table.sent())
    table.work()
    assert sent_indices(table) == [1]
    table.turn(table.sent())
    table.work()
    assert sent_indices(table) == [2]
    (hand,) = table.hands.values()
    assert (hand.tail, hand.tail_rows) == (3, 3)
    table.turn(table.sent(), table.handed())
    assert table.finished[1].reason == "handed_over"
    assert table.is_empty()


def test_what_the_other_side_has_is_not_sent():
    table = PdTable()
    begin(table, 1, range(15), prefix=2)
    table.work()
    assert sent_indices(table) == [2]
    table.turn(table.sent(), table.handed())
    # more than there is cannot be there
    begin(table, 2, range(100, 115), prefix=99)
    table.work()
    assert sent_indices(table) == []
    assert len(table.hands) == 1
    table.turn(table.handed())
    assert table.is_empty()


def test_hits_on_this_side_are_sent_at_once():
    table = PdTable()
    table.run(table.request(9, range(15), 1))
    turned = begin(table, 1, range(16))
    assert turned.cached == {1: 12}
    assert len(turned.outs[0].device) == 3
    turned = table.turn(table.copied())
    assert only(turned, SendBlocks).indices == (0, 1, 2)
    table.work()
    table.turn(table.sent(), table.handed())
    table.turn(*[table.sent() for _ in list(table.offers)])
    assert table.finished[1].cached_tokens == (12, 0, 0)
    assert table.is_empty()


def test_hits_on_the_host_are_sent_from_there_when_they_are_on_the_device():
    table = PdTable()
    leave_on_host(table, range(9))
    assert table.places(range(9)) == ["host", "host"]
    begin(table, 1, range(9))
    (copy,) = table.copies.values()
    turned = table.turn(table.copied())
    assert only(turned, SendBlocks).host == copy.host
    table.work()
    table.turn(table.sent(), table.handed())
    assert table.finished[1].cached_tokens == (0, 8, 0)
    assert table.is_empty()


def test_a_prompt_that_fills_its_blocks_has_no_open_one():
    table = PdTable()
    begin(table, 1, range(8))
    table.work()
    (hand,) = table.hands.values()
    assert (hand.tail, hand.tail_rows, hand.host, hand.slot) == (-1, 0, -1, -1)
    table.turn(table.sent(), table.handed())
    assert table.is_empty()


def test_no_offer_is_longer_than_sixteen_blocks():
    table = PdTable({"staging_blocks": 64}, max_step_tokens=128)
    begin(table, 1, range(80))
    table.work()
    assert [len(sent.indices) for sent in table.offers.values()] == [16, 4]
    assert sent_indices(table) == list(range(20))


def test_the_staging_ring_is_bounded_overall_and_for_each_instance():
    table = PdTable({"staging_blocks": 8, "ahead_tokens": 10_000}, max_step_tokens=128, num_blocks=128)
    for key, peer in enumerate(("d0", "d0", "d1", "d2")):
        begin(table, key, range(1000 * key, 1000 * key + 24), (peer,))
    table.work()
    per_peer = {}
    for sent in table.offers.values():
        per_peer[sent.peer] = per_peer.get(sent.peer, 0) + len(sent.indices)
    assert per_peer == {"d0": 4, "d1": 4}
    for offer in [offer for offer, sent in table.offers.items() if sent.peer == "d0"]:
        table.turn(table.sent(offer))
    table.work()
    assert sum(len(sent.indices) for sent in table.offers.values()) == 8
    for _ in range(50):
        if not table.offers and not table.hands:
            break
        table.turn(*[table.sent() for _ in list(table.offers)], *[table.handed() for _ in list(table.hands)])
        table.work()
    assert sorted(table.finished) == [0, 1, 2, 3]
    assert table.is_empty()


def test_a_decode_instance_that_takes_nothing_does_not_hold_up_one_that_does():
    table = PdTable({"staging_blocks": 4, "ahead_tokens": 10_000}, max_step_tokens=128)
    begin(table, 0, range(24), ("slow",))
    begin(table, 1, range(1000, 1012), ("quick",))
    for _ in range(10):
        table.work()
        quick = [offer for offer, sent in table.offers.items() if sent.peer == "quick"]
        hands = [offer for offer, hand in table.hands.items() if hand.peer == "quick"]
        if not quick and not hands:
            break
        table.turn(*map(table.sent, quick), *map(table.handed, hands))
    assert table.finished[1].reason == "handed_over"
    assert 0 not in table.finished


# -- groups


def test_a_group_sends_its_full_blocks_once_and_closes_each_sample():
    table = PdTable()
    begin(table, 1, range(10), n=3)
    table.work()
    assert sent_indices(table) == [0, 1]
    hands = list(table.hands.values())
    assert [(hand.key, hand.index, hand.tail, hand.tail_rows) for hand in hands] == [
        (1, 0, 2, 2),
        (2, 1, 2, 2),
        (3, 2, 2, 2),
    ]
    assert len({hand.host for hand in hands}) == 3
    assert len({hand.token for hand in hands}) == 3
    turned = table.turn(table.handed(hands[1].offer))
    assert [(end.key, end.reason, len(end.token_ids)) for end in turned.finishes] == [(2, "handed_over", 1)]
    turned = table.turn(table.sent(), table.handed(hands[0].offer))
    assert of(turned, GiveUpLease) == []
    turned = table.turn(table.handed(hands[2].offer))
    # all of it was handed over: there is nothing to give up
    assert of(turned, GiveUpLease) == []
    assert table.is_empty()


def test_samples_that_share_no_blocks_are_one_lease_all_the_same():
    table = PdTable(prefix_cache=False, num_host_blocks=64)
    events = table.hand_off(1, range(10), n=2, block_keys=())
    table.turn(*events)
    table.turn(table.granted(1))
    table.work()
    assert sent_indices(table) == [0, 1]
    # who leaves was the one whose blocks were sent
    table.turn(table.abort(1))
    table.turn(table.sent(), *[table.handed() for _ in list(table.hands)])
    assert table.finished[2].reason == "handed_over"
    assert table.is_empty()


def test_open_blocks_do_not_take_the_room_that_others_wait_for():
    # two host blocks, and a group of three samples with an open block each
    table = PdTable(num_host_blocks=2)
    begin(table, 1, range(14), n=3)
    for _ in range(20):
        table.work()
        if len(table.finished) == 3:
            break
        taken = [table.sent() for _ in list(table.offers)] + [table.handed() for _ in list(table.hands)]
        assert taken, "everybody waits for room"
        table.turn(*taken)
    assert [end.reason for end in table.finished.values()] == ["handed_over"] * 3
    assert table.is_empty()


def test_no_hand_over_closes_while_blocks_are_on_their_way_to_the_host():
    """A lease that is lost before any hand-over is sought anew: so nothing may be closed before all was offered."""
    table = PdTable(max_step_tokens=32)
    # it fills its blocks: there is no open one to wait for
    begin(table, 1, range(8), ("d0", "d1"))
    turned = table.turn(table.done())
    assert (len(table.copies), of(turned, HandOver)) == (1, [])
    turned = table.turn(*table.lost(1, 0))
    assert 1 not in table.finished
    assert [ask.peer for ask in of(turned, AskLease)] == ["d1"]
    table.turn(table.granted(1))
    table.work()
    table.turn(*[table.sent() for _ in list(table.offers)], table.handed())
    assert table.is_empty()
