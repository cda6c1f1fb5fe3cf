"""Decoding what others prefilled when blocks run short: reserve, preemption, waiting for leases (DECISIONS 23)."""

from __future__ import annotations

from random import Random

import pytest

from fdasync.actions import AnswerLease
from tests.pd_helpers import PdTable, of


def test_who_starts_midway_and_is_preempted_is_computed_again_here():
    table = PdTable(num_blocks=6, num_host_blocks=16, decode_reserve_blocks=0, max_step_tokens=32)
    table.turn(table.request(9, range(900, 907), 12))
    table.turn(table.lease(1, range(10), 8))
    table.arrive(1, range(10), tokens=(55,))
    while table.stats.preemptions == 0:
        table.turn(table.done(), *[table.copied() for _ in list(table.copies)])
    key = table.scheduler._sequences[1]
    known = list(key.tokens)
    assert known[10] == 55
    assert key.cached_tokens == (0, 0, 0)
    table.run()
    end = table.finished[1]
    # what it had stays, and its rows are whole
    assert [*range(10), *end.token_ids][: len(known)] == known
    assert (end.reason, end.num_rows) == ("length", 17)
    assert table.num_rows(1) == 17
    assert table.is_empty()


def test_a_decode_that_finds_no_block_while_only_leases_hold_them_waits():
    table = PdTable({"ttl_s": 5.0}, num_blocks=4, num_host_blocks=16, decode_reserve_blocks=0)
    table.turn(table.lease(1, range(7), 8))
    table.arrive(1, range(7), tokens=(55,))
    # it has two blocks; this takes the other two
    turned = table.turn(table.lease(5, range(100, 105), 2))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]
    table.run_steps()
    # it needs a third one
    assert len(table.scheduler._sequences[1].tokens) == 9
    assert table.stats.preemptions == 0
    # the lease's blocks come, it runs, and makes room
    table.arrive(5, range(100, 105), tokens=(66,))
    table.run()
    assert [table.finished[key].reason for key in (1, 5)] == ["length", "length"]
    assert table.is_empty()


def test_it_goes_on_when_the_lease_ends():
    table = PdTable(num_blocks=4, num_host_blocks=16, decode_reserve_blocks=0)
    table.turn(table.lease(1, range(7), 8))
    table.arrive(1, range(7), tokens=(55,))
    table.turn(table.lease(5, range(100, 105), 2))
    table.run_steps()
    assert 1 not in table.finished
    turned = table.turn(table.gives_up(5))
    assert len(turned.step.appends) == 1
    table.run()
    assert table.finished[1].reason == "length"
    assert table.is_empty()


def serve(table, prompts, seen):
    """Everything of the leases that were granted since so many answers arrives; returns how many there are now."""
    while seen < len(table.answered):
        answer = table.answered[seen]
        seen += 1
        if answer.verdict == "granted":
            table.arrive(answer.group, prompts[answer.group], prefix=answer.prefix_blocks)
    return seen


def burst(reserve: int) -> tuple[int, int]:
    """Sixty requests that others prefilled, all at once, on few blocks: how often somebody was preempted, and in how
    many steps all was done."""
    table = PdTable(
        {"line": 100, "age_s": 1e9, "beyond_running": 0}, num_blocks=40, num_host_blocks=200, max_running=16,
        max_step_tokens=32, decode_reserve_blocks=reserve,
    )  # fmt: skip
    random = Random(1)
    prompts = {}
    for key in range(60):
        prompts[key] = range(100 * key, 100 * key + random.randint(4, 9))
        table.turn(table.lease(key, prompts[key], random.randint(20, 30), total_s=1e9, ttl_s=1e9))
    seen = 0
    for _ in range(5000):
        if len(table.finished) == 60:
            return table.stats.preemptions, table.stats.steps
        seen = serve(table, prompts, seen)
        steps = [table.done()] if table.flying else []
        table.turn(*steps, *[table.copied() for _ in list(table.copies)])
    raise AssertionError("it does not end")


def test_the_reserve_prevents_a_storm_of_preemptions_and_blocks_nobody_for_long():
    (storm, storm_steps), (calm, calm_steps) = burst(0), burst(2)
    assert storm > 40
    # bounded by a quarter of the device, it halves them
    assert calm <= storm * 0.55
    # and nobody waits for long for room that stands empty
    assert calm_steps < storm_steps * 1.05


def test_the_reserve_is_never_more_than_a_request_can_still_need():
    table = PdTable(num_blocks=8, num_host_blocks=16, decode_reserve_blocks=2, max_step_tokens=32)
    table.turn(table.lease(1, range(9), 3))
    table.arrive(1, range(9))
    # it has its three blocks, and will need no more: five are free
    turned = table.turn(table.lease(2, range(100, 119), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]


def test_the_reserve_counts_what_those_who_decode_will_need_next():
    table = PdTable(num_blocks=8, num_host_blocks=16, decode_reserve_blocks=2, max_step_tokens=32)
    table.turn(table.lease(1, range(9), 20))
    table.arrive(1, range(9))
    turned = table.turn(table.lease(2, range(100, 115), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["queued"]
    turned = table.turn(table.lease(3, range(200, 207), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]


@pytest.mark.parametrize("depth", [1, 2])
def test_many_small_leases_and_one_big_one_all_get_through(depth):
    table = PdTable({"age_s": 1.0}, num_blocks=12, num_host_blocks=64, max_step_tokens=32, pipeline_depth=depth)
    prompts = {key: range(100 * key, 100 * key + 6) for key in range(1, 30)}
    prompts[0] = range(5000, 5038)
    seen = 0
    arrivals = [1, 2, 0, *range(3, 30)]
    for _ in range(2000):
        if len(table.finished) == 30:
            break
        table.now += 0.1
        events = [table.lease(key, prompts[key], 5, ttl_s=1e6, total_s=1e6) for key in arrivals[:1]]
        del arrivals[:1]
        steps = [table.done()] if table.flying else []
        table.turn(*events, *steps, *[table.copied() for _ in list(table.copies)])
        seen = serve(table, prompts, seen)
    order = [answer.group for answer in table.answered if answer.verdict == "granted"]
    assert sorted(order) == list(range(30))
    # it aged, and was not passed by all of those who came later
    assert order.index(0) < 25
    assert table.is_empty()
