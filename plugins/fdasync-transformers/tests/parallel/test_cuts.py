"""Parts of tensors are what slicing gives, in whatever pieces the stored tensor comes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from fdasync_transformers.parallel.cuts import Cut, Target
from fdasync_transformers.weights.mapping import destination
from fdasync_transformers.weights.placement import Placement
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import InvariantBroken


def part_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    pieces = whole.chunk(cut.pieces, cut.dim)
    return torch.cat([piece.chunk(cut.count, cut.dim)[cut.index] for piece in pieces], cut.dim)


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], Cut, list[int]]:
    count, pieces = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= count * pieces
    size = int(torch.tensor(shape).prod())
    marks = draw(st.lists(st.integers(0, size), max_size=5))
    return tuple(shape), Cut(dim, count, draw(st.integers(0, count - 1)), pieces), sorted({0, *marks, size})


@pytest.mark.ci
@given(cases())
@settings(max_examples=150, deadline=None)
def test_rows_and_flat_runs_end_in_the_part(case: tuple[tuple[int, ...], Cut, list[int]]) -> None:
    shape, cut, marks = case
    whole = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    want = part_of(whole, cut)
    assert cut.shape(shape) == tuple(want.shape)
    assert cut.whole_shape(tuple(want.shape)) == shape
    by_run, by_row = torch.full_like(want, -1), torch.full_like(want, -1)
    for first, last in pairwise(marks):
        Target(by_run, shape, cut).put_flat(first, whole.reshape(-1)[first:last])
    for first in range(0, shape[0], 3):
        Target(by_row, shape, cut).put(first, whole[first : first + 3])
    assert torch.equal(by_run, want)
    assert torch.equal(by_row, want)


def test_an_expert_goes_to_its_slice_of_a_packed_tensor() -> None:
    whole = torch.arange(3 * 8 * 2.0).view(3, 8, 2)
    for rank in range(2):
        cut = Cut(1, 2, rank, 2)
        held = torch.zeros(cut.shape(tuple(whole.shape)))
        for expert in range(3):
            for number, stored in enumerate(whole[expert].chunk(2)):
                destination(Placement("x", expert, number, 2), held, cut).put(0, stored)
        assert torch.equal(held, part_of(whole, cut))


def test_parts_that_are_not_cut_alike_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="one of 2 parts of a row"):
        Cut(1, 2, 0).inside_row(2)
    with pytest.raises(InvariantBroken, match="of a tensor that is cut by"):
        Cut(0, 2, 0).inside_row(1)


def test_ranks_beyond_the_slices_hold_the_same() -> None:
    assert [Cut(0, 2, 0).of_rank(rank, 4).index for rank in range(4)] == [0, 0, 1, 1]
