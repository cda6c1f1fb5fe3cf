"""Plans of recurrent states where lanes have versions: every row that decodes leaves its state, and a plan has room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fdasync_kernels.recurrence.spans import Spans
from fdasync_transformers.execution.states.plan import Spanned, plan_size, plan_states
from fdasync_transformers.model.recurrent.pieces import Take
from fdasync_transformers.model.recurrent.states import versions_of


def spanned(lanes: list[int], starts: list[int], counts: list[int], decodes: int) -> Spanned:
    return Spanned(*(np.array(each, np.int64) for each in (lanes, starts, counts)), decodes)


def test_each_row_of_a_run_leaves_its_version_behind_the_one_that_it_begins_from() -> None:
    versions = versions_of(3)
    states: Any = SimpleNamespace(versions=versions, first_place=4 * versions)
    size = plan_size(4, 16, 32, 4)
    arrays = plan_states(size, spanned([2, 0], [9, 7], [4, 1], 2), {}, [], states)
    spans = Spans.of(torch.from_numpy(arrays["spans"]), size, None, 2)
    assert spans.sources.tolist() == [2 * versions, 0]
    assert spans.first_stops.tolist() == [0, 4, 5]
    first = 2 * versions
    assert spans.stops[:5].tolist() == [[1, first + 1], [2, first + 2], [3, first + 3], [4, first + 4], [5, 1]]
    # a step of which no row stands goes on from where it began
    assert len({*spans.stops[:4, 1].tolist(), first}) == versions == 5


def test_a_plan_has_room_for_any_step() -> None:
    running, drafts, block, budget = 4, 3, 4, 32
    versions = versions_of(drafts)
    states: Any = SimpleNamespace(versions=versions, first_place=running * versions)
    size = plan_size(running, running * (1 + drafts), budget, block)
    # all decode, each with every draft, and blocks are long
    longest = plan_size(running, running * (1 + drafts), running * (1 + drafts), 16)
    plan_states(longest, spanned([0, 1, 2, 3], [9] * 4, [4] * 4, 4), {}, [], states)
    # one decodes; prompts have a snapshot at every end of a block, and one behind their last token
    starts, counts = [9, 3, 7, 3], [4, 9, 10, 9]
    takes, place = [], 0
    for lane, start, count in zip((1, 2, 3), starts[1:], counts[1:], strict=True):
        ends = {at for at in range(start + 1, start + count + 1) if at % block == 0} | {start + count}
        for at in sorted(ends):
            takes.append(Take(lane, at, place))
            place += 1
    plan_states(size, spanned([0, 1, 2, 3], starts, counts, 1), {}, takes, states)
