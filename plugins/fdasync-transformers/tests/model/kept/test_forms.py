"""The recipes of kept forms, against plain loops: `model/kept/forms.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fdasync_kernels.experts.stored import StoredWeights
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.tiny.quantised import FP4, fp8_of, plain_of_fp8, plain_of_mxfp4
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from fdasync_transformers.model.kept.forms import Form


def noise(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    size=st.sampled_from([1e-30, 1e-3, 0.02, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_fp8_is_quantised_block_by_block(rows: int, columns: int, size: float, seed: int) -> None:
    plain = noise(rows, columns, seed=seed, size=size)
    values, scales = FP8.quantised(plain)
    wanted, factors = fp8_of(plain, (128, 128))
    assert torch.equal(bits(values), bits(wanted))
    assert torch.equal(scales, factors)
    assert (values.shape, scales.shape) == FP8.shapes(plain.shape)
    assert torch.equal(FP8.dequantised(values, scales), plain_of_fp8(values, scales, (128, 128)).to(torch.bfloat16))
    # a step of E4M3 is an eighth of a power of two; the smallest are a 512th of it apart
    room = (
        plain.abs().float() / 16 + scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns] / 512
    )
    assert bool(((FP8.dequantised(values, scales).float() - plain.float()).abs() <= room * 1.01).all())


def test_fp8_of_zeros_and_of_what_is_nearly_nothing() -> None:
    plain = torch.zeros(130, 256, dtype=torch.bfloat16)
    plain[0, 200] = 1e-39
    values, scales = FP8.quantised(plain)
    assert bool(values.float().isfinite().all())
    assert bool((scales > 0).all())
    assert not FP8.dequantised(values, scales)[:, :128].any()


def test_weights_count_as_bfloat16_before_they_are_quantised() -> None:
    wide = noise(128, 256, dtype=torch.float32)
    for form, matrix in ((FP8, wide), (MXFP4, wide[None])):
        for one, other in zip(form.quantised(matrix), form.quantised(matrix.to(torch.bfloat16)), strict=True):
            assert torch.equal(bits(one), bits(other))


def test_experts_are_quantised_each_by_itself() -> None:
    plain = noise(3, 256, 192)
    values, scales = FP8.quantised(plain)
    for expert in range(3):
        wanted, factors = FP8.quantised(plain[expert])
        assert torch.equal(bits(values[expert]), bits(wanted))
        assert torch.equal(scales[expert], factors)
    kept = Kept.made_of(plain, FP8)
    assert torch.equal(bits(kept.values), bits(values))
    assert torch.equal(kept.scales, scales)


def ocp(group: np.ndarray) -> tuple[int, list[float]]:
    """The exponent and the values of a group by the specification: the nearest value, of two the even one."""
    most = float(np.abs(group).max())
    exponent = -127 if not most else max(-127, math.floor(math.log2(most)) - 2)
    found = []
    for number in group.tolist():
        size = min(6.0, abs(number) / 2.0**exponent)
        near = sorted(range(8), key=lambda code: (abs(float(FP4[code]) - size), code % 2))[0]
        found.append(math.copysign(float(FP4[near]), number))
    return exponent, found


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    size=st.sampled_from([2.0**-100, 1e-3, 0.02, 1.0]),
    halves=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mxfp4_is_quantised_as_the_specification_says(
    rows: int, groups: int, size: float, halves: bool, seed: int
) -> None:
    columns = 64 * groups
    plain = noise(1, columns, rows, seed=seed, size=size)
    if halves:
        # many ties
        plain = ((plain / size * 8).round() / 8 * 2.0 ** math.floor(math.log2(size))).to(torch.bfloat16)
    values, scales = MXFP4.quantised(plain)
    assert (values.shape, scales.shape) == MXFP4.shapes(plain.shape)
    made = StoredWeights("mxfp4", values, scales).dequantised(0).float()
    for row in range(rows):
        numbers = plain[0, :, row].float().numpy()
        for group in range(2 * groups):
            exponent, found = ocp(numbers[32 * group : 32 * group + 32])
            assert int(scales[0, row, group]) == exponent + 127
            got = (made[row, 32 * group : 32 * group + 32] * 2.0**-exponent).tolist()
            assert [(one, math.copysign(1, one)) for one in got] == [(one, math.copysign(1, one)) for one in found]


def test_mxfp4_of_a_checkpoint_is_repacked() -> None:
    make = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 5, 4, 16), dtype=torch.uint8, generator=make)
    exponents = torch.randint(100, 129, (2, 5, 4), dtype=torch.uint8, generator=make)
    values, scales = MXFP4.packed(blocks, exponents)
    kept = Kept(MXFP4, {"x": values, "x_scales": scales}, "x")
    wanted = plain_of_mxfp4(blocks, exponents).to(torch.bfloat16)
    assert kept.shape == wanted.shape == (2, 128, 5)
    assert torch.equal(kept[0:2], wanted)
    assert torch.equal(kept[torch.tensor(1)], wanted[1])
    assert torch.equal(MXFP4.dequantised(blocks, exponents), wanted)
    with pytest.raises(IndexError, match="expert 2 of 2"):
        kept[2]


@pytest.mark.gpu
@pytest.mark.parametrize("form", [FP8, MXFP4])
def test_a_gpu_quantises_to_the_same_bits(form: Form) -> None:
    """So that a trainer's fingerprint is an engine's."""
    plain = noise(4, 512, 640) * torch.logspace(-4, 0.5, 4)[:, None, None].to(torch.bfloat16)
    for one, other in zip(form.quantised(plain), form.quantised(plain.cuda()), strict=True):
        assert torch.equal(bits(one), bits(other.cpu()))
    values, scales = form.quantised(plain)
    kept = Kept(form, {"x": values, "x" + form.scales_end: scales}, "x")
    on_gpu = Kept(form, {"x": values.cuda(), "x" + form.scales_end: scales.cuda()}, "x")
    assert torch.equal(kept[0:4], on_gpu[0:4].cpu())


def test_weights_without_an_exponent_are_refused() -> None:
    with pytest.raises(BadInput, match="too large"):
        MXFP4.quantised(torch.full((1, 64, 1), 16.0))


@pytest.mark.parametrize(
    ("form", "shape", "halves", "why"),
    [
        (FP8, (4, 256, 48), 2, ""),
        (FP8, (4, 100, 48), 1, ""),
        (FP8, (4, 192, 48), 2, "of 96 rows each, which blocks of 128 cross"),
        (FP8, (4, 256, 40), 1, "with rows of 40, no multiple of 16"),
        (MXFP4, (4, 128, 7), 2, ""),
        (MXFP4, (4, 96, 7), 1, "with rows of 96, no multiple of 64"),
    ],
)
def test_shapes_that_cannot_be_kept(form: object, shape: tuple[int, ...], halves: int, why: str) -> None:
    assert form.problem(shape, halves=halves) == why  # type: ignore[attr-defined]
