"""What arrives under a lease, and how its samples start here (docs/design.md, section 6, rules 7, 18, 20)."""

from __future__ import annotations

import pytest

from fdasync.events.actions import ConfirmHandOver, DropLease, EmitTokens, FinishRequest, ReceiveBlocks
from tests.support.pd_table import PdTable, of, only


def far(number, length=10):
    return range(1000 * number, 1000 * number + length)


def test_offered_blocks_are_copied_to_the_host_and_from_there_to_the_device():
    table = PdTable()
    table.turn(table.lease(1, range(10)))
    table.now = 3.0
    turned = table.turn(table.offered(1, 5, 0, 1))
    receive = only(turned, ReceiveBlocks)
    assert (receive.group, receive.offers, receive.indices, receive.rows) == (1, (5, 5), (0, 1), (4, 4))
    assert receive.deadline == 13.0
    turned = table.turn(table.received())
    (copy,) = turned.ins
    assert (copy.host, copy.slots) == (receive.host, receive.slots)
    assert table.places(range(10)) == ["both", "both"]
    assert table.stats.received_blocks == 2
    assert table.turn(table.copied()).starts == []
    turned = table.turn(table.first(1, 1, 6, 55, 2))
    receive = only(turned, ReceiveBlocks)
    assert (receive.offers, receive.indices, receive.rows) == ((6,), (2,), (2,))
    table.turn(table.received())
    turned = table.turn(table.copied())
    assert of(turned, ConfirmHandOver) == [ConfirmHandOver(1, 1, False)]
    (start,) = turned.step.starts
    assert (start.num_cached, len(start.blocks)) == (10, 3)
    assert turned.chunks == [(1, 1, True)]
    table.run()
    end = table.finished[1]
    assert (end.reason, len(end.token_ids), end.token_ids[0]) == ("length", 8, 55)
    assert end.num_rows == table.num_rows(1) == 17
    assert table.is_empty()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_open_blocks_of_every_length(rows):
    table = PdTable()
    prompt = range(8 + rows)
    table.turn(table.lease(1, prompt))
    table.arrive(1, prompt, tokens=(55,))
    assert table.confirmed == [ConfirmHandOver(1, 1, False)]
    table.run()
    end = table.finished[1]
    assert (end.reason, len(end.token_ids), end.num_rows) == ("length", 8, len(prompt) + 7)
    # what it decoded is indexed behind what came
    text = [*prompt, *end.token_ids]
    assert len(table.places(text[:-1])) == (len(text) - 1) // 4
    assert "" not in table.places(text[:-1])
    assert table.is_empty()


def test_a_prompt_without_a_full_block():
    table = PdTable()
    table.turn(table.lease(1, range(3), 2))
    table.arrive(1, range(3))
    table.run()
    assert (table.finished[1].reason, table.finished[1].num_rows) == ("length", 4)
    assert table.is_empty()


def test_the_first_token_may_come_before_the_blocks():
    table = PdTable()
    table.turn(table.lease(1, range(8)))
    assert of(table.turn(table.first(1, 1, 9)), ConfirmHandOver) == []
    table.turn(table.offered(1, 5, 1))
    table.settle()
    assert table.confirmed == []
    table.turn(table.offered(1, 6, 0))
    table.settle()
    assert table.confirmed == [ConfirmHandOver(1, 1, False)]
    table.run()
    assert table.is_empty()


def test_samples_of_a_group_share_full_blocks_and_start_apart():
    table = PdTable()
    table.turn(table.lease(1, range(10), 3, n=2))
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 2, 7, 71, 2))
    table.settle()
    assert [confirm.key for confirm in table.confirmed] == [2]
    assert table.stats.leased == 1
    before = table.scheduler.index.num_available
    table.turn(table.first(1, 1, 8, 72, 2))
    table.settle()
    assert [confirm.key for confirm in table.confirmed] == [2, 1]
    # its block had been promised
    assert table.scheduler.index.num_available == before
    table.run()
    assert [table.finished[key].token_ids[0] for key in (1, 2)] == [72, 71]
    assert table.stats.received_blocks == 4
    assert table.is_empty()


def test_one_sample_may_end_while_its_open_block_is_on_its_way():
    table = PdTable()
    table.turn(table.lease(1, range(10), 3, n=2))
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 7, 71, 2), table.first(1, 2, 8, 72, 2))
    turned = table.turn(table.abort(1))
    assert of(turned, DropLease) == []
    table.settle()
    assert [confirm.key for confirm in table.confirmed] == [2]
    table.run()
    assert (table.finished[1].reason, table.finished[2].reason) == ("abort", "length")
    assert table.is_empty()


# -- the first token may be the last


def test_a_first_token_that_is_the_last():
    for fields, reason in (({"max_tokens": 1}, "length"), ({"stop_ids": frozenset({55})}, "stop")):
        table = PdTable()
        table.turn(table.lease(1, range(10), emits=True, **fields))
        table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 6, 55, 2))
        table.turn(table.received())
        turned = table.turn(table.copied())
        names = [type(action) for action in turned.actions]
        # the token is its request's before the request ends
        assert names.index(ConfirmHandOver) < names.index(FinishRequest)
        assert of(turned, ConfirmHandOver) == [ConfirmHandOver(1, 1, True)]
        end = turned.finish
        assert (end.reason, end.token_ids, end.num_rows) == (reason, (55,), 10)
        assert end.matched_stop == (55 if reason == "stop" else -1)
        assert turned.steps == []
        assert table.num_rows(1) == 10
        # what was checked stays as cache
        assert table.places(range(10)) == ["both", "both"]
        assert table.is_empty()


def test_a_stop_id_counts_only_from_the_least_length_on():
    table = PdTable()
    table.turn(table.lease(1, range(10), 3, stop_ids=frozenset({55}), min_tokens=2))
    table.arrive(1, range(10), tokens=(55,))
    table.run()
    assert (table.finished[1].reason, len(table.finished[1].token_ids)) == ("length", 3)


def test_a_first_token_that_completes_a_stop_string():
    table = PdTable()
    table.turn(table.lease(1, range(10), 1, emits=True, checks_stops=True))
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 6, 55, 2))
    table.turn(table.received())
    turned = table.turn(table.copied())
    # it waits for the answer
    assert turned.finishes == []
    turned = table.turn(table.matched(1, 1))
    assert (turned.finish.reason, turned.finish.token_ids, turned.finish.num_rows) == ("stop", (55,), 10)
    assert table.is_empty()


def test_a_first_token_that_holds_no_stop_string_ends_it_by_length():
    table = PdTable()
    table.turn(table.lease(1, range(10), 1, emits=True, checks_stops=True))
    table.arrive(1, range(10), tokens=(55,))
    turned = table.turn(table.checked(1, 1))
    assert (turned.finish.reason, turned.finish.token_ids) == ("length", (55,))
    assert table.is_empty()


def test_first_tokens_are_emitted_by_the_confirmation_and_the_others_by_steps():
    table = PdTable()
    table.turn(table.lease(1, range(10), 3, emits=True))
    table.arrive(1, range(10), tokens=(55,))
    turned = table.turn(table.done(66))
    assert only(turned, EmitTokens).tokens == (66,)
    table.run()
    assert table.finished[1].token_ids[:2] == (55, 66)


# -- promises broken


def test_blocks_offered_twice_or_out_of_range_end_the_lease():
    for bad in ((0,), (2,), (99,)):
        table = PdTable()
        table.turn(table.lease(1, range(10)))
        table.turn(table.offered(1, 5, 0))
        turned = table.turn(table.offered(1, 6, *bad))
        assert [drop.group for drop in of(turned, DropLease)] == [1]
        assert turned.finish.reason == "lease_lost"
        table.settle()
        # what had been on its way is checked, and good
        assert table.places(range(10)) == ["host", ""]
        assert table.is_empty()


def test_blocks_of_the_prefix_need_not_be_offered():
    table = PdTable()
    table.run(table.request(900, range(9), 1))
    table.turn(table.lease(1, range(14)))
    turned = table.turn(table.offered(1, 5, 1, 2))
    assert "2 to 2" in only(turned, DropLease).reason
    assert table.is_empty()


def test_blocks_that_do_not_arrive_end_the_lease_and_the_others_stay():
    table = PdTable()
    table.turn(table.lease(1, range(13)))
    table.turn(table.offered(1, 5, 0, 1, 2))
    turned = table.turn(table.received(arrived="+-+"))
    drop = only(turned, DropLease)
    assert drop.reason == "its blocks did not arrive: damaged"
    assert turned.finish.reason == "lease_lost"
    table.settle()
    assert [place != "" for place in table.places(range(13))] == [True, False, True]
    assert table.is_empty()


def test_an_open_block_that_does_not_arrive_ends_the_lease():
    table = PdTable()
    table.turn(table.lease(1, range(3)), table.lease(5, far(5, 3)))
    table.turn(table.first(1, 1, 5, 7, 3))
    turned = table.turn(table.received(arrived="-"))
    assert [drop.group for drop in of(turned, DropLease)] == [1]
    table.turn(table.gives_up(5))
    assert table.is_empty()


def test_blocks_that_arrive_for_a_dead_lease_stay_as_cache():
    for end in ("gives_up", "abort"):
        table = PdTable()
        table.turn(table.lease(1, range(10)))
        table.turn(table.offered(1, 5, 0, 1))
        table.turn(getattr(table, end)(1))
        turned = table.turn(table.received(arrived="+-"))
        assert turned.ins == []
        assert table.places(range(10)) == ["host", ""]
        assert table.is_empty()
        # and serves the next one
        table.turn(table.lease(2, range(10), 2))
        assert table.answered[-1].prefix_blocks == 1
        table.settle()
        table.arrive(2, range(10), prefix=1)
        table.run()
        assert table.finished[2].reason == "length"
        assert table.is_empty()


def test_an_identity_that_was_computed_meanwhile_stays_the_one():
    table = PdTable()
    table.turn(table.lease(1, range(10), 3))
    table.turn(table.offered(1, 5, 0, 1))
    table.run_steps(table.request(9, range(10), 1))
    ours = [table.scheduler.index.get(key) for key in table.keys(range(10))]
    assert None not in ours
    table.settle()
    assert [table.scheduler.index.get(key) for key in table.keys(range(10))] == ours
    table.turn(table.first(1, 1, 6, 7, 2))
    table.settle()
    table.run()
    assert table.finished[1].reason == "length"
    assert table.is_empty()


# -- the ring


def test_blocks_on_their_way_are_bounded_overall_and_for_each_instance():
    table = PdTable({"staging_blocks": 8}, num_blocks=128)
    for group, peer in ((1, "p0"), (2, "p0"), (3, "p1"), (4, "p2")):
        table.turn(table.lease(group, far(group, 25), 2, peer=peer))
    for group in (1, 2, 3, 4):
        table.turn(table.offered(group, group, *range(6)))
    counts = {}
    for receive in table.receives.values():
        counts[receive.group] = counts.get(receive.group, 0) + len(receive.indices)
    assert counts == {1: 4, 3: 4}
    table.settle()
    assert table.stats.received_blocks == 24
    for group in (1, 2, 3, 4):
        table.turn(table.first(group, group, 100 + group, 7, 1))
    table.settle()
    assert len(table.confirmed) == 4
    table.run()
    assert table.is_empty()


def test_no_copy_is_longer_than_sixteen_blocks():
    table = PdTable({"staging_blocks": 64}, num_blocks=128)
    table.turn(table.lease(1, range(80), 2))
    table.turn(table.offered(1, 5, *range(20)))
    assert [len(receive.indices) for receive in table.receives.values()] == [16, 4]


def test_a_request_that_waits_for_the_ring_gives_it_up_with_its_lease():
    table = PdTable({"staging_blocks": 2})
    table.turn(table.lease(1, range(9), peer="p0"), table.lease(2, far(2, 9), peer="p0"))
    table.turn(table.offered(1, 5, 0, 1), table.offered(2, 6, 0, 1))
    assert [receive.group for receive in table.receives.values()] == [1]
    table.turn(table.abort(2), table.gives_up(1))
    turned = table.turn(table.received())
    assert of(turned, ReceiveBlocks) == []
    assert table.is_empty()


def test_a_full_host_is_waited_for():
    table = PdTable(num_host_blocks=1)
    table.turn(table.lease(1, range(9), 2))
    table.arrive(1, range(9))
    assert table.confirmed == [ConfirmHandOver(1, 1, False)]
    table.run()
    assert table.is_empty()


# -- given up in the turn in which everything was there


def test_giving_up_in_the_turn_of_the_start_wins():
    table = PdTable()
    table.turn(table.lease(1, range(10), emits=True))
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 6, 55, 2))
    table.turn(table.received())
    turned = table.turn(table.copied(), table.gives_up(1))
    assert of(turned, ConfirmHandOver) == []
    assert (turned.finish.reason, turned.finish.token_ids) == ("lease_lost", ())
    assert turned.steps == []
    assert table.is_empty()


def test_giving_up_after_the_start_changes_nothing():
    table = PdTable()
    table.turn(table.lease(1, range(10)))
    table.arrive(1, range(10))
    assert table.turn(table.gives_up(1)).finishes == []
    table.run()
    assert table.finished[1].reason == "length"
    assert table.is_empty()


def test_an_abort_in_the_turn_of_the_start_ends_with_the_first_token():
    table = PdTable()
    table.turn(table.lease(1, range(10), emits=True))
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 6, 55, 2))
    table.turn(table.received())
    actions = table.scheduler.handle([table.copied(), table.abort(1)])
    names = [type(action) for action in actions]
    assert names.index(ConfirmHandOver) < names.index(FinishRequest)
    (end,) = [action for action in actions if isinstance(action, FinishRequest)]
    assert (end.reason, end.token_ids, end.num_rows) == ("abort", (55,), 10)
    table.scheduler.check()


# -- what is left of those that ended


def test_the_open_block_of_a_sample_that_ended_is_not_fetched_when_the_ring_has_room():
    table = PdTable({"staging_blocks": 2})
    table.turn(table.lease(1, range(10), 3, n=2))
    # the ring has room for one block of this instance
    table.turn(table.offered(1, 5, 0, 1), table.first(1, 1, 7, 71, 2), table.first(1, 2, 8, 72, 2))
    table.turn(table.abort(1))
    received = 0
    while table.receives or table.copies:
        received += sum(len(receive.indices) for receive in table.receives.values())
        ends = [table.received() for _ in list(table.receives)]
        table.turn(*ends, *[table.copied() for _ in list(table.copies)])
    # two full blocks, and the other one's open one
    assert received == 3
    table.run()
    assert [table.finished[key].reason for key in (1, 2)] == ["abort", "length"]
    assert table.is_empty()


def test_blocks_that_a_copy_brings_after_new_weights_serve_no_request():
    table = PdTable(namespace=b"weights 0")
    table.turn(table.lease(1, range(10)))
    table.turn(table.offered(1, 5, 0, 1))
    old = table.keys(range(10))
    table.turn(table.weights(1))
    table.turn(table.received())
    index = table.scheduler.index
    assert [index.get(key) for key in old] == [None, None]
    assert table.is_empty()
    assert table.stats.free_host_blocks == table.config.num_host_blocks


def test_no_copy_may_last_longer_than_its_lease():
    table = PdTable({"receive_s": 10.0})
    table.turn(table.lease(1, range(10), total_s=6.0))
    table.now = 3.0
    assert only(table.turn(table.offered(1, 5, 0, 1)), ReceiveBlocks).deadline == 7.0


def test_a_sample_whose_block_is_still_being_copied_out_starts_when_that_has_ended():
    """A prompt that fills its blocks takes its open one last, of those that were promised."""
    table = PdTable(num_blocks=2, num_host_blocks=1, decode_reserve_blocks=0)
    table.run(table.request(9, far(9, 4), 1))
    (block,) = table.scheduler.index.pool.live()
    table.scheduler.swap_planner.keep(block)
    table.turn()
    table.answer()
    assert table.places(far(9, 4)) == ["both"]
    # it gets the free block, and the promise of the other one
    table.turn(table.lease(1, range(4), 2))
    table.turn(table.offered(1, 5, 0))
    assert table.places(far(9, 4)) == ["device"]
    table.turn(table.received())
    # what is here is brought to the device, and the other block goes out once more
    while table.copies and not any(
        block.device_moves and not block.ref_count for block in table.scheduler.index.pool.live()
    ):
        table.turn(table.copied())
    turned = table.turn(table.first(1, 1, 6, 71))
    assert of(turned, ConfirmHandOver) == []
    turned = table.turn(table.copied())
    assert of(turned, ConfirmHandOver) == [ConfirmHandOver(1, 1, False)]
    table.run()
    assert table.is_empty()
