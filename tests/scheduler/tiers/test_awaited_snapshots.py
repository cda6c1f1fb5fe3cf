"""Snapshots of sequences whose steps may yield several tokens: which steps are told of them, and when they count."""

from __future__ import annotations

import pytest

from fdasync.cache.blocks import Block
from fdasync.cache.snapshots import SnapshotPool
from fdasync.errors import InvariantBroken
from fdasync.scheduler.tiers.snapshot_planner import SnapshotPlanner
from tests.scheduler.table import Table
from tests.support.attached import attached

PROMPT = range(6)


def recurrent(**config) -> Table:
    values = {
        "recurrent": True,
        "num_snapshots": 8,
        "state_every_tokens": 1000,
        "max_step_tokens": 64,
        "max_run_tokens": 3,
    }
    return Table(**{**values, **config})


def takes(turned) -> list[tuple[int, int]]:
    """(position, place) of the snapshots that the turn's steps take."""
    return [(take.position, take.place) for step in turned.steps for take in step.snapshots]


def begin(table: Table, max_tokens: int = 20):
    """The prompt's 6 tokens are computed, and 100 is known: the next step forwards it, and up to two drafts."""
    table.turn(table.request(1, PROMPT, max_tokens))
    return table.turn(table.runs([100]))


def test_each_step_that_may_come_to_the_end_of_a_block_is_told_of_the_same_place():
    table = recurrent()
    # behind it 7 to 9 tokens are forwarded: at 8 a block ends
    ((position, place),) = takes(begin(table))
    assert position == 8
    # it forwarded one: 8 to 10 behind the next
    assert takes(table.turn(table.runs([101]))) == [(8, place)]
    # that one came there, and the next one to 9 at least
    assert takes(table.turn(table.runs([102]))) == []


def test_a_run_that_comes_there_leaves_it_to_no_other_step():
    table = recurrent()
    ((position, place),) = takes(begin(table))
    assert position == 8
    # 9 are forwarded; 10 to 12 behind the next step
    ((later, other),) = takes(table.turn(table.runs([101, 102, 103])))
    assert later == 12
    assert other != place


def test_steps_in_flight_are_told_until_one_must_have_come_there():
    table = recurrent(pipeline_depth=2)
    # of two steps in flight behind the prompt's, the first comes to 7 to 9 and the second to 8 to 12
    first = takes(table.turn(table.request(1, PROMPT, 20)))
    seen = first + takes(table.turn(table.runs([100]))) + takes(table.turn(table.runs([101])))
    at_8 = {place for position, place in seen if position == 8}
    assert len(at_8) == 1
    assert sum(position == 8 for position, _ in seen) >= 2
    table.run()
    assert table.is_empty()


def test_nobody_starts_from_it_before_its_block_is_sealed():
    table = recurrent()
    begin(table)
    table.turn(table.runs([101]))
    pool = attached(table.scheduler, SnapshotPlanner).pool
    (awaited,) = [one for one in pool.live() if one.awaited]
    assert not awaited.can_start(1000)
    (start,) = table.turn(table.runs([102]), table.request(2, [*PROMPT, 100, 101, 102, 7], 1)).step.starts
    assert not awaited.awaited
    assert (start.num_cached, start.snapshot) == (8, awaited.place)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_keeps_the_snapshot_of_its_last_full_block(depth: int):
    table = recurrent(pipeline_depth=depth)
    table.run(table.request(1, PROMPT, 16))
    assert table.stats.num_snapshots - table.stats.free_snapshots == 2
    output = table.finished[1].token_ids
    (start,) = table.turn(table.request(2, [*PROMPT, *output, 7], 1)).step.starts
    assert start.num_cached == 20
    table.run()
    assert table.is_empty()


def test_an_answer_that_ends_before_gives_its_place_back():
    table = recurrent()
    begin(table, 2)
    table.run()
    # that of the prompt alone
    assert table.stats.num_snapshots - table.stats.free_snapshots == 1
    assert table.is_empty()


def test_the_one_before_is_kept_until_the_next_is_certain():
    table = recurrent()
    begin(table)
    table.turn(table.runs([101, 102, 103]))
    # 12 is awaited, 4 and 8 were taken
    assert [one.awaited for one in attached(table.scheduler, SnapshotPlanner).pool.live()] == [False, False, True]
    table.turn(table.abort(1))
    table.run()
    (start,) = table.turn(table.request(2, [*PROMPT, 100, 101, 102, 7], 1)).step.starts
    assert start.num_cached == 8


def test_the_pool_keeps_an_awaited_place():
    pool = SnapshotPool(1)
    block = Block(0, -1, None)
    snapshot = pool.take(block, 1, awaited=True)
    assert snapshot is not None
    pool.step_done(1)
    # no step in flight, and its sequence may go on any time
    assert not pool.has_room()
    assert pool.take(Block(1, -1, None), 2) is None
    assert pool.next_dirty(1) == []
    pool.check()
    pool.await_in(snapshot, 3)
    assert not snapshot.can_start(9)
    pool.step_done(3)
    pool.reached(snapshot)
    assert snapshot.can_start(4)
    assert pool.next_dirty(1) == [snapshot]
    assert pool.has_room()


def test_an_awaited_snapshot_of_a_sealed_block_is_a_fault():
    pool = SnapshotPool(1)
    block = Block(0, -1, None)
    pool.take(block, 1, awaited=True)
    block.key = b"sealed"
    with pytest.raises(InvariantBroken, match="awaited"):
        pool.check()
