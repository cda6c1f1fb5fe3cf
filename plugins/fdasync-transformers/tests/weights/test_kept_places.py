"""Where tensors go that are kept as stored, in pieces and on ranks: `weights/kept/targets.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.parallel.cuts import Cut, Target
from fdasync_transformers.weights.kept import targets
from fdasync_transformers.weights.kept.arriving import pairs_of, places_of
from fdasync_transformers.weights.kept.targets import InRows, KeptTarget
from fdasync_transformers.weights.mapping import destination
from fdasync_transformers.weights.placement import Placement
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput, InvariantBroken
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from fdasync_transformers.model.kept.forms import Form


class Rows(InRows):
    """Keeps what it is given."""

    device = torch.device("cpu")  # type: ignore[assignment]

    def __init__(self, shape: tuple[int, ...], step: int) -> None:
        super().__init__(shape, step)
        self.made = torch.full(shape, -1.0)
        self.calls: list[tuple[int, int]] = []

    def put(self, first: int, rows: torch.Tensor) -> None:
        self.made[first : first + len(rows)] = rows
        self.calls.append((first, len(rows)))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_elements_come_in_any_pieces(data: st.DataObject, rows: int, columns: int, step: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32)
    place = Rows((rows, columns), step)
    # an update that ended early leaves nothing behind
    place.put_flat(0, whole[: data.draw(st.integers(0, len(whole) - 1))] * 0)
    place.calls.clear()
    place.made.fill_(-1)
    first = 0
    while first < len(whole):
        count = data.draw(st.integers(1, len(whole) - first))
        place.put_flat(first, whole[first : first + count])
        first += count
    assert torch.equal(place.made.view(-1), whole)
    # one after the other, in whole steps
    ends = [at + count for at, count in place.calls]
    assert [at for at, _ in place.calls] == [0, *ends[:-1]]
    assert all(count % step == 0 or at + count == rows for at, count in place.calls)
    if rows * columns > 2:
        with pytest.raises(InvariantBroken, match="element 2 came"):
            place.put_flat(2, whole[2:3])


def test_much_is_put_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_PUT_ELEMENTS", 50)
    whole = torch.arange(9 * 10, dtype=torch.float32)
    place = Rows((9, 10), 2)
    place.put_flat(0, whole[:5])
    place.put_flat(5, whole[5:])
    assert torch.equal(place.made.view(-1), whole)
    assert place.calls == [(0, 2), (2, 4), (6, 3)]


def split(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The part of a rank, the slow way."""
    return torch.cat(
        [tensor.narrow(cut.dim, there, count) for _, there, count in cut.runs(tensor.shape[cut.dim])], cut.dim
    )


def kept_part(shape: tuple[int, ...], cut: Cut | None) -> Kept:
    part = shape if cut is None else cut.shape(shape)
    made = Kept.empty(FP8, part, "cpu")
    made.scales.fill_(-1)
    made.values.view(torch.uint8).fill_(0)
    return made


CUTS = {
    "whole": None,
    "gate and up": Cut(1, 2, 1, 2),
    "inner": Cut(2, 3, 2),
    "rows": Cut(1, 4, 2),
}


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("stored", [False, True])
def test_a_rank_gets_its_part_of_values_and_scales(how: str, stored: bool) -> None:
    """Of fused tensors, and of gate and up projections that come expert by expert."""
    cut = CUTS[how]
    plain = torch.randn((2, 512, 384), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values, scales = FP8.quantised(plain)
    wanted = (values.view(torch.uint8), scales)
    if cut is not None:
        wanted = split(wanted[0], cut), split(wanted[1], cut)
    fused, by_expert = kept_part(tuple(plain.shape), cut), kept_part(tuple(plain.shape), cut)
    fill(destination(Placement("x"), fused, cut), plain, stored=stored)
    parts = 2 if how != "rows" else 1
    for expert in range(2):
        for part, piece in enumerate(plain[expert].chunk(parts)):
            fill(destination(Placement("x", expert, part, parts), by_expert, cut), piece, stored=stored)
    for made in (fused, by_expert):
        assert torch.equal(made.values.view(torch.uint8), wanted[0])
        assert torch.equal(made.scales, wanted[1])


def fill(target: Target | KeptTarget, plain: torch.Tensor, *, stored: bool) -> None:
    """In pieces: plain elements, or those of both stored parts."""
    assert isinstance(target, KeptTarget)
    sides: list[tuple[object, torch.Tensor]] = [(target, plain)]
    if stored:
        values, scales = FP8.quantised(plain)
        dtypes = ("float8_e4m3fn", "float32")
        names = ("x.weight", "x.weight_scale_inv")
        metas = [
            TensorMeta(name, dtype, tuple(each.shape))
            for name, dtype, each in zip(names, dtypes, (values, scales), strict=True)
        ]
        pair = pairs_of(metas)["x.weight"]
        sides = list(zip(places_of(pair, target), (values, scales), strict=True))
    for place, tensor in sides:
        flat = tensor.reshape(-1)
        for first in range(0, len(flat), 1000):
            place.put_flat(first, flat[first : first + 1000])  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", [FP8, MXFP4])
def test_a_pair_for_a_plain_place_is_dequantised_when_both_are_there(form: Form) -> None:
    plain = torch.randn((2, 64, 128), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    held = torch.zeros((2, 64, 128), dtype=torch.float32)
    if form is FP8:
        values, scales = FP8.quantised(plain)
        metas = [TensorMeta("x", "float8_e4m3fn", (2, 64, 128)), TensorMeta("x_scale_inv", "float32", (2, 1, 1))]
    else:
        make = torch.Generator().manual_seed(3)
        values = torch.randint(0, 256, (2, 128, 2, 16), dtype=torch.uint8, generator=make)
        scales = torch.randint(118, 128, (2, 128, 2), dtype=torch.uint8, generator=make)
        metas = [TensorMeta("x_blocks", "uint8", (2, 128, 2, 16)), TensorMeta("x_scales", "uint8", (2, 128, 2))]
    pair = pairs_of(metas)[metas[0].name]
    assert (pair.name, pair.shape) == ("x", (2, 64, 128))
    one, other = places_of(pair, Target.whole(held))
    other.put_flat(0, scales.reshape(-1))
    assert not held.any()
    one.put_flat(0, values.reshape(-1))
    assert torch.equal(held, form.dequantised(values, scales).float())


def test_exponents_that_no_weight_has_are_refused_as_they_come() -> None:
    made = Kept.empty(MXFP4, (1, 64, 2), "cpu")
    target = destination(Placement("x"), made)
    metas = [TensorMeta("x_blocks", "uint8", (1, 2, 2, 16)), TensorMeta("x_scales", "uint8", (1, 2, 2))]
    _, scales = places_of(pairs_of(metas)["x_scales"], target)
    with pytest.raises(BadInput, match="129 is too large"):
        scales.put_flat(0, torch.full((4,), 129, dtype=torch.uint8))
