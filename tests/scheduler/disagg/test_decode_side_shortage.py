"""Decoding what others prefilled when blocks run short: reserve, preemption, waiting for leases (docs/design.md,
rule 23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.events.actions import AnswerLease
from fdasync.scheduler.state.sequence import State
from tests.scheduler.disagg.pressure import Pressure
from tests.support.helpers import case_settings
from tests.support.pd_table import PdTable, of


def test_a_request_that_starts_midway_and_is_preempted_is_computed_again_here():
    table = PdTable(num_blocks=6, num_host_blocks=16, decode_reserve_blocks=0, max_step_tokens=32)
    table.turn(table.request(9, range(900, 907), 12))
    table.turn(table.lease(1, range(10), 8))
    table.arrive(1, range(10), tokens=(55,))
    while table.stats.preemptions == 0:
        table.turn(table.done(), *[table.copied() for _ in list(table.copies)])
    key = table.scheduler.sequences[1]
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
    assert len(table.scheduler.sequences[1].tokens) == 9
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


# (blocks, lanes, live requests, tokens of prompts and of outputs, how long an output may be)
PRESSED = {
    "outputs beyond prompts": (40, 16, 48, (4, 9), (20, 30), 0),
    "outputs of any length": (300, 64, 96, (8, 16), (8, 120), 128),
}


def pressed(name: str, reserve: int, ends: int = 300) -> Pressure:
    """More requests than there is room for, one coming for each that ends."""
    blocks, lanes, live, prompt, output, limit = PRESSED[name]
    context = Pressure(
        {"age_s": 2.0}, num_blocks=blocks, max_running=lanes, max_step_tokens=64, decode_reserve_blocks=reserve
    )
    while len(context.table.finished) < ends:
        while context.live < live:
            context.lease(context.random.randint(*prompt), context.random.randint(*output), limit)
        context.step()
        assert context.seconds < 600, "it does not end"
    return context


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["outputs beyond prompts", pytest.param("outputs of any length", marks=pytest.mark.nightly)]
)
def test_the_reserve_prevents_storms_of_preemptions_and_blocks_no_request(name):
    storm, calm = pressed(name, 0), pressed(name, 2)
    assert storm.preempted_each > 0.9
    assert calm.preempted_each < 0.5
    assert calm.preempted_each < 0.45 * storm.preempted_each
    # room that stands empty costs less than a tenth of what gets done
    assert calm.goodput > 0.92 * storm.goodput
    # and of what the last of them waits for
    waits = [max(context.granted[key] - context.asked[key] for key in context.granted) for context in (storm, calm)]
    assert waits[1] < 1.2 * waits[0]


def test_the_reserve_is_never_more_than_a_request_can_still_need():
    table = PdTable(num_blocks=8, num_host_blocks=16, decode_reserve_blocks=2, max_step_tokens=32)
    table.turn(table.lease(1, range(9), 3))
    table.arrive(1, range(9))
    # it has its three blocks, and will need no more: five are free
    turned = table.turn(table.lease(2, range(100, 119), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]


def test_the_reserve_counts_what_decoding_sequences_will_need_next():
    table = PdTable(num_blocks=8, num_host_blocks=16, decode_reserve_blocks=2, max_step_tokens=32)
    table.turn(table.lease(1, range(9), 20))
    table.arrive(1, range(9))
    turned = table.turn(table.lease(2, range(100, 115), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["queued"]
    turned = table.turn(table.lease(3, range(200, 207), 1))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]


# -- nobody waits for ever


def small_lease(context):
    context.lease(context.random.randint(3, 7), context.random.randint(4, 12))


def small_local(context):
    context.local(context.random.randint(3, 7), context.random.randint(4, 12))


def either(context):
    (small_lease if context.random.random() < 0.5 else small_local)(context)


STREAMS = {"leases": small_lease, "own": small_local, "both": either}


def crowded(depth: int = 1, reserve: int = 2, lanes: int = 8, seed: int = 1, beyond: int = 64) -> Pressure:
    rules = {"age_s": 2.0, "beyond_running": beyond}
    config = {"num_blocks": 16, "max_running": lanes, "max_step_tokens": 32, "pipeline_depth": depth}
    return Pressure(rules, seed, **config, decode_reserve_blocks=reserve)


def flood(context: Pressure, more, seconds: float, live: int = 10) -> None:
    """Small ones keep coming for so long."""
    until = context.seconds + seconds
    while context.seconds < until:
        while context.live < live:
            more(context)
        context.step()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("big", ["lease", "local"])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_big_one_gets_room_soon_however_many_small_ones_come(big, stream, depth):
    context = crowded(depth)
    flood(context, STREAMS[stream], 1.0)
    key = getattr(context, big)(54, 4)
    flood(context, STREAMS[stream], 20.0)
    assert context.table.finished[key].reason == "length"
    # it ages, and those that have room end
    assert context.waits[key] < 2.0 + 1.5
    # the others go on
    assert len(context.table.finished) > 150


@pytest.mark.ci
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("output", [24, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3)]])
def test_a_preempted_request_comes_back_soon_however_many_small_ones_come(stream, output, seed):
    context = crowded(seed=seed, reserve=0)
    flood(context, STREAMS[stream], 1.0)
    key = context.lease(18, output)
    flood(context, STREAMS[stream], 30.0)
    assert context.table.stats.preemptions > 5
    assert context.table.finished[key].reason == "length"
    assert max(context.waits.values()) < 2.0 + 2.0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host", [0, 16])
def test_no_lease_is_granted_while_one_that_was_preempted_waits(depth, host):
    table = PdTable(
        num_blocks=8, num_host_blocks=host, decode_reserve_blocks=0, max_step_tokens=32, pipeline_depth=depth
    )
    table.turn(table.request(9, range(900, 915), 12), table.request(1, range(15), 12))
    while table.stats.preemptions == 0:
        table.turn(*([table.done()] if table.flying else []), *[table.copied() for _ in list(table.copies)])
    # it would fit at once, and nobody has waited for long
    waiting = table.scheduler.sequences[1]
    events = [table.lease(5, range(500, 503), 2)]
    fitted = False
    while waiting.state in (State.WAITING, State.LEAVING):
        turned = table.turn(*events, *([table.done()] if table.flying else []))
        fitted = fitted or table.scheduler.index.num_available > 0
        assert "granted" not in [answer.verdict for answer in of(turned, AnswerLease)]
        events = [table.copied() for _ in list(table.copies)]
    assert fitted
    table.turn(*events, table.gives_up(5))
    table.run()
    assert table.is_empty()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("big", ["lease", "local"])
def test_lanes_are_given_in_the_same_order(big):
    context = crowded(lanes=2)
    flood(context, small_lease if big == "local" else small_local, 1.0, live=6)
    key = getattr(context, big)(5, 4)
    flood(context, small_lease if big == "local" else small_local, 20.0, live=6)
    assert context.table.finished[key].reason == "length"
    assert context.waits[key] < 2.0 + 1.5


@pytest.mark.heavy("no other test bounds how long a request may wait for blocks")
@given(st.integers(0, 1 << 20), st.sampled_from([1, 2]), st.integers(0, 2), st.integers(2, 8))
@case_settings(15)
def test_no_request_waits_longer_than_all_older_ones_take(seed, depth, reserve, lanes):
    context = crowded(depth, reserve, lanes, seed, beyond=seed % 9)
    random = context.random
    keys = []
    for _ in range(6):
        flood(context, STREAMS[random.choice(list(STREAMS))], 2.0, live=random.randint(2, 10))
        big = context.lease if random.random() < 0.5 else context.local
        keys.append(big(random.randint(8, 50), random.randint(2, 14)))
    flood(context, either, 10.0, live=8)
    # of a few big ones, one after the other, each a second at most, and small ones
    assert max(context.waits.values()) < 2.0 + 6.0
    assert all(key in context.table.finished for key in keys)
    while context.live:
        context.step()
    assert context.table.is_empty()


def test_a_higher_priority_goes_before_one_that_has_aged():
    table = PdTable({"age_s": 2.0}, num_blocks=8, max_step_tokens=64)
    table.turn(table.request(1, range(100, 120), 8))
    table.turn(table.request(2, range(200, 220), 2))
    table.turn(table.done())
    table.now += 3
    turned = table.turn(table.lease(5, range(300, 303)), table.lease(6, range(400, 403), priority=1))
    assert sorted((answer.group, answer.verdict) for answer in of(turned, AnswerLease)) == [
        (5, "queued"), (6, "granted"),
    ]  # fmt: skip


def test_a_request_that_waits_for_something_else_than_room_holds_up_no_other():
    table = PdTable({"age_s": 2.0}, num_blocks=8, max_step_tokens=64)
    table.turn(*table.hand_off(1, range(9), ("d0",)), table.request(2, range(100, 112), 8))
    table.turn(table.request(3, range(200, 220), 2))
    table.turn(table.done())
    table.now += 3
    # number 3 has aged and finds no room; number 1 waits for an answer
    turned = table.turn(table.lease(5, range(300, 303)))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["queued"]
    turned = table.turn(table.abort(3))
    assert [answer.verdict for answer in of(turned, AnswerLease)] == ["granted"]
