"""Room for requests that others prefill: who gets a lease, and when it is over (docs/design.md,
section 6, rules 19, 22, 23)."""

from __future__ import annotations

from fdasync.events.actions import AnswerLease, DropLease, ReceiveBlocks
from fdasync.events.catalog import LeaseGivenUp
from tests.support.pd_table import PdTable, leave_on_host, of, only


def verdicts(turned):
    return [(answer.group, answer.verdict) for answer in of(turned, AnswerLease)]


def far(number, length=10):
    return range(1000 * number, 1000 * number + length)


# -- grants


def test_a_grant_takes_room_for_the_prompt_and_the_first_tokens():
    table = PdTable(num_blocks=16)
    turned = table.turn(table.lease(1, range(10), n=2))
    assert only(turned, AnswerLease) == AnswerLease(1, "granted")
    # two full blocks for both, and an open one each
    assert table.scheduler.index.num_available == 16 - 4
    assert (table.stats.leased, table.stats.leases_granted) == (2, 1)
    turned = table.turn(table.gives_up(1))
    assert [(end.key, end.reason, end.note) for end in turned.finishes] == [
        (1, "lease_lost", "not wanted"),
        (2, "lease_lost", "not wanted"),
    ]
    assert table.is_empty()


def test_a_sample_that_ends_with_its_first_token_gives_its_room_to_the_next_lease_at_once():
    table = PdTable({"ttl_s": 50.0}, num_blocks=5, decode_reserve_blocks=0)
    assert verdicts(table.turn(table.lease(1, range(9), n=2, stop_ids=(77,)))) == [(1, "granted")]
    assert verdicts(table.turn(table.lease(5, far(1, 5)))) == [(5, "queued")]
    table.turn(table.offered(1, 10, 0, 1))
    table.settle()
    # the other sample has yet to come: no event but this one tells of the end
    turned = table.turn(table.first(1, 1, 11, 77, 1))
    while table.receives or table.copies:
        received = [table.received() for _ in range(len(table.receives))]
        turned = table.turn(*received, *[table.copied() for _ in range(len(table.copies))])
    assert [finish.key for finish in turned.finishes] == [1]
    assert verdicts(turned) == [(5, "granted")]


def test_a_grant_pins_the_prefix_that_is_here():
    table = PdTable(num_blocks=8, num_host_blocks=8)
    table.run(table.request(900, range(9), 1))
    turned = table.turn(table.lease(1, range(18)))
    assert only(turned, AnswerLease).prefix_blocks == 2
    # whoever comes now can have all but what is pinned and what is promised
    turned = table.turn(table.request(2, far(2, 12), 1))
    assert turned.starts == [2]
    table.work()
    assert table.places(range(9)) == ["device", "device"]
    table.turn(table.gives_up(1))
    assert table.is_empty()


def test_a_prefix_on_the_host_is_brought_and_waited_for():
    table = PdTable()
    leave_on_host(table, range(9))
    turned = table.turn(table.lease(1, range(9), 2))
    assert only(turned, AnswerLease).prefix_blocks == 2
    assert [len(copy.device) for copy in turned.ins] == [2]
    turned = table.turn(table.first(1, 1, 5, 7, 1))
    table.turn(table.received())
    numbers = sorted(table.copies)
    # the open block arrives first: the prefix is still on its way
    assert table.turn(table.copied(numbers[1])).starts == []
    turned = table.turn(table.copied(numbers[0]))
    assert turned.cached == {1: 9}
    table.run()
    assert table.finished[1].token_ids[0] == 7
    assert table.is_empty()


def test_blocks_that_are_still_computed_are_no_prefix():
    table = PdTable()
    table.turn(table.request(1, range(9), 4))
    assert only(table.turn(table.lease(5, range(9))), AnswerLease).prefix_blocks == 0


def test_without_a_prefix_cache_everything_is_sent():
    table = PdTable(prefix_cache=False)
    turned = table.turn(table.lease(1, range(9), 2))
    assert only(turned, AnswerLease).prefix_blocks == 0
    table.arrive(1, range(9))
    table.run()
    assert table.finished[1].reason == "length"
    assert table.is_empty()


def test_what_is_too_big_is_denied_for_good():
    table = PdTable(num_blocks=8)
    turned = table.turn(table.lease(1, range(20), 14))
    answer = only(turned, AnswerLease)
    assert (answer.verdict, answer.retry_after_s) == ("denied", -1.0)
    assert "9 KV blocks" in answer.reason
    assert turned.finish.reason == "lease_lost"
    # as many as there are fit, when it is alone
    assert verdicts(table.turn(table.lease(2, range(20), 13))) == [(2, "granted")]
    table.turn(table.gives_up(2))
    # a group needs an open block for each sample
    answer = only(table.turn(table.lease(10, range(21), 2, n=4)), AnswerLease)
    assert (answer.verdict, answer.retry_after_s) == ("denied", -1.0)
    assert table.is_empty()


def test_more_samples_than_there_are_lanes_get_a_lease_when_no_other_request_has_one():
    table = PdTable({"beyond_running": 1}, max_running=2)
    assert verdicts(table.turn(table.lease(10, range(6), n=3))) == [(10, "granted")]
    assert verdicts(table.turn(table.lease(20, range(6), n=4))) == [(20, "queued")]
    assert verdicts(table.turn(LeaseGivenUp(groups=(10,), reason="enough"))) == [(20, "granted")]


def test_other_weights_are_denied_for_now():
    table = PdTable(namespace=b"weights 1")
    answer = only(table.turn(table.lease(1, range(9), namespace=b"weights 0")), AnswerLease)
    assert (answer.verdict, answer.reason) == ("denied", "it has other weights")
    assert 0 < answer.retry_after_s < 1
    assert table.is_empty()


# -- the line


def fill(table, blocks, key=900):
    """Somebody holds so many blocks, and may go on for long."""
    return table.turn(table.request(key, far(90, 4 * blocks - 1), 4))


def test_what_does_not_fit_waits_in_line_and_is_told_once():
    table = PdTable(num_blocks=8, max_step_tokens=64)
    fill(table, 6)
    assert verdicts(table.turn(table.lease(1, range(10)))) == [(1, "queued")]
    assert verdicts(table.turn()) == []
    assert table.stats.leased == 1
    for _ in range(6):
        turned = table.turn(*([table.done()] if table.flying else []), *[table.copied() for _ in list(table.copies)])
        if verdicts(turned):
            break
    assert verdicts(turned) == [(1, "granted")]


def test_a_request_that_fits_passes_one_that_does_not_until_that_one_has_aged():
    table = PdTable({"age_s": 2.0}, num_blocks=8, max_step_tokens=64)
    fill(table, 4)
    assert verdicts(table.turn(table.lease(1, range(18)))) == [(1, "queued")]
    table.now = 2.9
    assert verdicts(table.turn(table.lease(2, far(2, 4)))) == [(2, "granted")]
    table.turn(table.gives_up(2))
    table.now = 3.0
    # it has aged: nobody passes any more, and those who come are told that they wait
    assert verdicts(table.turn(table.lease(3, far(3, 4)))) == [(3, "queued")]
    assert verdicts(table.turn(table.lease(4, far(4, 4)))) == [(4, "queued")]
    # nobody is told twice that he waits
    assert verdicts(table.turn(table.gives_up(1))) == [(3, "granted")]


def test_the_line_is_in_order_of_priority_then_age():
    table = PdTable(num_blocks=8, max_step_tokens=64)
    fill(table, 7)
    table.turn(table.lease(1, far(1, 5)), table.lease(2, far(2, 5)), table.lease(3, far(3, 5), priority=1))
    order = []
    for _ in range(8):
        turned = table.turn(*([table.done()] if table.flying else []), *[table.copied() for _ in list(table.copies)])
        order += verdicts(turned)
    assert order == [(3, "granted"), (1, "granted"), (2, "granted")]


def test_the_line_is_bounded():
    table = PdTable({"line": 2}, num_blocks=8, max_step_tokens=64)
    fill(table, 7)
    table.turn(table.lease(1, far(1)), table.lease(2, far(2)))
    answer = only(table.turn(table.lease(3, far(3))), AnswerLease)
    assert (answer.verdict, answer.reason) == ("denied", "2 leases wait in line")
    assert answer.retry_after_s > 0
    table.turn(table.gives_up(1, 2))
    table.run()
    assert table.is_empty()


def test_lanes_are_bounded_too():
    table = PdTable({"beyond_running": 1}, max_running=2)
    table.turn(table.lease(1, far(1, 3)), table.lease(2, far(2, 3), n=2))
    assert verdicts(table.turn(table.lease(5, far(5, 3)))) == [(5, "queued")]
    assert verdicts(table.turn(table.gives_up(1))) == [(5, "granted")]


def test_one_always_fits_alone_whatever_the_reserve():
    table = PdTable(num_blocks=8, decode_reserve_blocks=4)
    assert verdicts(table.turn(table.lease(1, range(30), 2))) == [(1, "granted")]


# -- ends


def test_a_lease_that_is_not_renewed_is_over():
    table = PdTable()
    turned = table.turn(table.lease(1, range(9), ttl_s=5.0), table.lease(2, far(2), ttl_s=5.0))
    assert turned.wakes[-1].time <= 6.0
    table.now = 5.0
    assert table.turn(table.renewed(2, 77)).finishes == []
    table.now = 6.0
    turned = table.turn(table.timer(6.0))
    assert of(turned, DropLease) == [DropLease(1, "it was not renewed for 5 s")]
    assert (turned.finish.key, turned.finish.reason) == (1, "lease_lost")
    table.now = 10.0
    assert [drop.group for drop in of(table.turn(table.timer(10.0)), DropLease)] == [2]
    assert (table.stats.leases_granted, table.stats.leases_dropped) == (2, 2)
    assert table.is_empty()


def test_one_in_line_is_over_in_the_same_way():
    table = PdTable(num_blocks=8, max_step_tokens=64)
    fill(table, 7)
    table.turn(table.lease(1, range(9), ttl_s=5.0))
    table.now = 6.0
    assert [drop.group for drop in of(table.turn(table.timer(6.0)), DropLease)] == [1]
    table.run()
    assert table.is_empty()


def test_renewals_do_not_help_against_the_total_deadline():
    table = PdTable()
    table.turn(table.lease(1, range(9), total_s=10.0))
    for now in (4.0, 8.0, 10.9):
        table.now = now
        assert table.turn(table.renewed(1)).finishes == []
    table.now = 11.2
    turned = table.turn(table.renewed(1))
    assert of(turned, DropLease) == [DropLease(1, "it was not handed over in time")]
    assert table.is_empty()


def test_no_lease_lasts_longer_than_the_rules_of_its_giver():
    table = PdTable({"max_ttl_s": 6.0, "max_total_s": 9.0})
    table.turn(table.lease(1, range(9), ttl_s=1e9, total_s=1e9), table.lease(2, far(2), ttl_s=1e9, total_s=1e9))
    table.now = 6.9
    assert table.turn(table.renewed(2)).finishes == []
    table.now = 7.3
    assert of(table.turn(table.timer(7.3)), DropLease) == [DropLease(1, "it was not renewed for 6 s")]
    table.now = 9.9
    assert table.turn(table.renewed(2)).finishes == []
    table.now = 10.3
    assert of(table.turn(table.timer(10.3)), DropLease) == [DropLease(2, "it was not handed over in time")]
    assert table.is_empty()


def test_the_timer_looks_again_as_long_as_there_are_leases():
    table = PdTable()
    table.turn(table.lease(1, range(9)))
    times = []
    for _ in range(40):
        if table.stats.leased == 0:
            break
        table.now = table.scheduler._wake_at
        times.append(table.now)
        table.turn(table.timer(table.now))
    assert len(times) > 10
    assert times[-1] <= 6.3
    assert table.is_empty()


def test_an_abort_and_a_deadline_of_a_leased_sample():
    table = PdTable()
    table.turn(table.lease(1, range(9), n=2), table.lease(5, far(5), deadline=3.0))
    turned = table.turn(table.abort(1))
    assert (turned.finish.reason, turned.finish.token_ids) == ("abort", ())
    # the other one is still wanted
    assert of(turned, DropLease) == []
    turned = table.turn(table.abort(2))
    assert of(turned, DropLease) == [DropLease(1, "its request ended", ended=True)]
    table.now = 3.0
    turned = table.turn(table.timer(3.0))
    assert (turned.finish.key, turned.finish.reason) == (5, "deadline")
    assert of(turned, DropLease) == [DropLease(5, "its request ended", ended=True)]
    assert table.is_empty()


def test_an_end_in_the_turn_of_an_offer_receives_nothing():
    for end in ("abort", "gives_up"):
        table = PdTable()
        table.turn(table.lease(1, range(9)))
        turned = table.turn(table.offered(1, 5, 0, 1), getattr(table, end)(1))
        assert of(turned, ReceiveBlocks) == []
        assert table.is_empty()


def test_new_weights_drop_every_lease():
    table = PdTable(namespace=b"weights 0", num_blocks=8, max_step_tokens=64)
    table.turn(table.lease(1, range(9)), table.lease(2, far(2, 30), 1))
    table.turn(table.offered(1, 5, 0))
    turned = table.turn(table.weights(1))
    assert [drop.group for drop in of(turned, DropLease)] == [1, 2]
    # what arrives now was computed under the old ones
    table.turn(table.received())
    assert table.places(range(9)) == ["", ""]
    assert table.is_empty()


def test_renewals_of_leases_that_are_not_there_are_passed_over():
    table = PdTable()
    turned = table.turn(
        table.renewed(1), table.gives_up(1), table.offered(1, 5, 0), table.first(1, 1, 6), table.abort(1)
    )
    assert turned.actions == []
    table.turn(table.lease(1, range(9)))
    turned = table.turn(table.first(1, 2, 6), table.gives_up(3))
    assert turned.actions == []
    table.turn(table.gives_up(1))
    assert table.is_empty()
