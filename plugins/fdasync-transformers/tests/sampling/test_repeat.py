"""Rows that are planned once and repeated: the plan is that of all rows, planned one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fdasync_transformers.sampling.plan import plan_samples
from fdasync_transformers.sampling.repeat import repeat_rows
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import InvariantBroken
from fdasync.request import SamplerSpec

BIAS = {"bias_ids": np.array([4, 9], "<i4").tobytes(), "bias_values": np.array([1.5, -2.0], "<f4").tobytes()}
# each row, and whether it may be repeated
KINDS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"raw": True}, True),
    ({"temperature": 1.0}, True),
    ({"temperature": 0.7, "raw": True, "processed": True, "top": 2}, True),
    ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "processed": True, "top": 3}, True),
    ({"temperature": 1.0, "raw": True, "top": 1, **BIAS}, True),
    ({**BIAS}, True),
    ({"temperature": 1.0, "stop_ids": (7,)}, True),
    ({"presence_penalty": 0.5, "raw": True}, False),
    ({"presence_penalty": 0.5, **BIAS}, False),
    ({"min_tokens": 20, "stop_ids": (7, -1, 8)}, False),
]


def make(own: dict[str, Any]) -> SamplerSpec:
    return SamplerSpec(**({"prompt_len": 2, "seed": 3} | own))


@given(st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(1, 4)), min_size=1, max_size=8), st.data())
def test_it_is_the_plan_of_all_rows(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    specs = [make(KINDS[kind][0]) for kind, _ in rows]
    times = [count if KINDS[kind][1] else 1 for kind, count in rows]
    # those at the end have drawn noise, and are not repeated
    drawn = data.draw(st.integers(0, len(rows)))
    times[len(rows) - drawn :] = [1] * drawn
    positions, lanes = list(range(10, 10 + len(rows))), list(range(5, 5 + len(rows)))
    of = np.repeat(np.arange(len(rows)), times)
    wanted = plan_samples(
        [specs[row] for row in of], [positions[row] for row in of], [lanes[row] for row in of],
        undrawn=len(of) - drawn,
    )  # fmt: skip
    found = repeat_rows(plan_samples(specs, positions, lanes, undrawn=len(rows) - drawn), np.array(times))
    for name in wanted.__struct_fields__:
        if name not in ("arrays", "raw", "processed"):
            assert getattr(found, name) == getattr(wanted, name), name
    assert np.array_equal(found.raw, wanted.raw)
    assert np.array_equal(found.processed, wanted.processed)
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array), name


@pytest.mark.parametrize("own", [own for own, repeats in KINDS if not repeats])
def test_what_depends_on_earlier_tokens_is_not_repeated(own: dict[str, Any]) -> None:
    with pytest.raises(InvariantBroken, match="cannot be repeated"):
        repeat_rows(plan_samples([make(own)], [10], [0]), np.array([2]))


@pytest.mark.parametrize("times", [[1], [1, 0]])
def test_every_row_comes(times: list[int]) -> None:
    with pytest.raises(InvariantBroken, match="to repeat"):
        repeat_rows(plan_samples([make({})] * 2, [10, 10], [0, 1]), np.array(times))
