"""Sequences that want the positions that indexers choose, as the scheduler plans them: no block has them, so there is
no hit beyond the first position that is wanted (docs/design.md, rule 46)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fdasync.scheduler.state.sequence import Sequence
from tests.scheduler.table import Table
from tests.support.helpers import make_sampler

A = range(14)


def choosing(table, key, tokens, start, max_tokens=2, **fields):
    return table.request(key, tokens, max_tokens, sampler=make_sampler(len(tokens), chosen_from=start), **fields)


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (13, 12), (-1, 12)])
def test_hits_end_before_the_first_position_that_is_wanted(start, cached):
    table = Table()
    table.run(table.request(1, A, 2))
    assert table.turn(choosing(table, 2, A, start)).cached == {2: cached}
    # its own computation of a block that is indexed stays private
    table.run()
    assert table.turn(table.request(3, A, 2)).cached == {3: 12}
    table.run()
    assert table.is_empty()


def test_preempted_ones_compute_what_is_left():
    table = Table(num_blocks=7, max_step_tokens=5, decode_reserve_blocks=0)
    table.turn(table.request(1, range(100, 104), 12, priority=1))
    turned = table.turn(table.done(), choosing(table, 2, range(20), 3))
    began = []
    while table.flying:
        if turned.steps:
            began += [(start.num_cached, start.sampler.chosen_from) for start in turned.step.starts]
        turned = table.turn(table.done())
    assert table.stats.preemptions == 1
    # the rows up to position 16 came with the first pass; of its four full blocks one was evicted meanwhile. The
    # runner's memory begins where it did
    assert began == [(0, 3), (12, 3)]
    assert len(table.finished[2].token_ids) == 2


@pytest.mark.parametrize(
    ("planned", "have", "waits"),
    [
        (0, 3, True), (12, 3, True), (13, 3, False), (14, 3, False),
        # preempted behind its prompt: the rows stand, however it ends
        (0, 13, False), (0, 12, True),
    ],
)  # fmt: skip
def test_a_sample_waits_until_the_rows_of_the_prompt_are_planned_or_stand(planned, have, waits):
    first = SimpleNamespace(planned=planned, chosen_from=have)
    sample = SimpleNamespace(first=first, chosen_from=13, prompt_len=14)
    assert Sequence._waits_for_prompt.fget(sample) is waits
    assert Sequence._waits_for_prompt.fget(SimpleNamespace(first=None, chosen_from=3, prompt_len=14)) is False
    assert Sequence._waits_for_prompt.fget(SimpleNamespace(first=first, chosen_from=-1, prompt_len=14)) is False
