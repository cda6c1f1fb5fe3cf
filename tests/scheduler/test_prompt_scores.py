"""Prompts that are scored, as the scheduler plans them: no hit beyond the first position that is scored
(docs/design.md, rule 12)."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table
from tests.scheduler.tiers.scenes import make_table
from tests.support.helpers import make_sampler

A = range(14)


def scoring(table, key, tokens, start, max_tokens=2, **fields):
    return table.request(key, tokens, max_tokens, sampler=make_sampler(len(tokens), score_from=start), **fields)


@pytest.mark.parametrize(
    ("start", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (-1, 12)]
)
def test_hits_end_before_the_position_whose_logits_score(start, cached):
    table = Table()
    table.run(table.request(1, A, 2))
    turned = table.turn(scoring(table, 2, A, start))
    assert turned.cached == {2: cached}
    # its own computation of a block that is indexed stays private
    table.run()
    assert table.turn(table.request(3, A, 2)).cached == {3: 12}
    table.run()
    assert table.is_empty()


def test_it_waits_for_no_leader_of_blocks_that_it_may_not_use():
    table = Table(max_step_tokens=32)
    turned = table.turn(table.request(1, A, 2), scoring(table, 2, A, 2), scoring(table, 3, A, 5))
    assert turned.starts == [1, 2]
    # the third one waits for the first block alone
    assert table.turn(table.done()).cached == {3: 4}
    table.run()


def test_only_what_it_may_use_is_looked_up():
    table = make_table(A)
    (lookup,) = table.turn(scoring(table, 1, A, 9)).lookups
    assert lookup.keys == tuple(table.keys(A)[:2])
    table.turn(table.looked_up())
    table.turn(table.fetched())
    assert table.turn(table.copied()).cached == {1: 8}
    table.run()
    assert table.is_empty()


def test_preempted_ones_score_what_is_left():
    table = Table(num_blocks=7, max_step_tokens=5, decode_reserve_blocks=0)
    table.turn(table.request(1, range(100, 104), 12, priority=1))
    turned = table.turn(table.done(), scoring(table, 2, range(20), 3))
    scored_from = []
    while table.flying:
        if turned.steps:
            scored_from += [(start.num_cached, start.sampler.score_from) for start in turned.step.starts]
        turned = table.turn(table.done())
    assert table.stats.preemptions == 1
    # the first pass scored the tokens up to that at 16; of its four full blocks one was evicted meanwhile
    assert scored_from == [(0, 3), (12, 17)]
    assert len(table.finished[2].token_ids) == 2
