"""Norms of heads, rotary embedding and the write of KV in one kernel: `layer/qkv.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fdasync_kernels.layer.qkv import QkvForm, prepare_qkv
from layer_reference import even, prepared

from fdasync.errors import BadInput

BLOCK_TOKENS = 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMS = {
    "plain": QkvForm(6, 2, 16, 16),
    "norms of heads": QkvForm(8, 2, 16, 16, norm="head", eps=1e-6),
    "a part turned": QkvForm(4, 3, 24, 8, norm="head", eps=1e-5),
    "odd widths": QkvForm(3, 1, 20, 12, norm="head", eps=1e-5, norm_rounds_once=True),
    "a norm of the row, clipped": QkvForm(3, 2, 16, 12, norm="row", eps=1e-5, clip=0.75),
    "neighbours": QkvForm(5, 5, 16, 16, interleaved=True, full_precision=True),
    "neighbours of a part, normed": QkvForm(5, 2, 16, 12, interleaved=True, norm="head", eps=1e-5),
}


class Case:
    """Inputs of a form: strided where strides are taken, poison around them and where the kernel is to write."""

    def __init__(
        self,
        form: QkvForm,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool = False,
        shares: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(rows)
        shape = (rows, form.width)
        self.form = form
        wide = torch.full((rows, form.width + 8), float("nan"))
        wide[:, : form.width] = even(shape, draw) if exact else torch.randn(shape, generator=draw)
        self.qkv = wide.to(device, dtype)[:, : form.width]
        angle = torch.randn((rows, form.rotary_dim // 2), generator=draw) * 9
        angles = torch.float32 if form.full_precision else dtype
        self.cos, self.sin = (torch.cat((x, x), -1).to(device, angles) for x in (angle.cos(), angle.sin()))
        self.weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if form.norm:
            heads = (1, 1) if form.norm == "head" else (form.heads, form.kv_heads)
            one, other = (1 + 0.3 * torch.randn(count * form.head_dim, generator=draw) for count in heads)
            self.weights = (one.to(device, dtype), other.to(device, dtype))
        blocks = -(-rows // BLOCK_TOKENS) + 1
        # two layers in a block, as in the pool: this one is the second
        each = form.kv_heads // (shares or form.kv_heads)
        pool = torch.full((blocks, form.kv_heads // each, 2, 2, BLOCK_TOKENS, each, form.head_dim), float("nan"))
        self.pool = pool.to(device, dtype)
        self.keys, self.values = (self.pool[:, :, 1, which].transpose(1, 2) for which in (0, 1))
        self.slots = torch.randperm(blocks * BLOCK_TOKENS, generator=draw)[:rows].to(device)

    def run(self) -> torch.Tensor:
        return prepare_qkv(self.qkv, self.cos, self.sin, self.keys, self.values, self.slots, self.form, *self.weights)

    def stored(self, rows: Any = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        block, offset = self.slots[rows] // BLOCK_TOKENS, self.slots[rows] % BLOCK_TOKENS
        return self.keys[block, offset].flatten(1, 2), self.values[block, offset].flatten(1, 2)

    def wanted(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def cast(x: torch.Tensor | None) -> torch.Tensor | None:
            return x if x is None or dtype is None else x.to(dtype)

        half = self.form.rotary_dim // 2
        qkv, cos, sin = cast(self.qkv), cast(self.cos[:, :half]), cast(self.sin[:, :half])
        assert qkv is not None
        assert cos is not None
        assert sin is not None
        return prepared(qkv, cos, sin, self.form, *(cast(weight) for weight in self.weights))


@pytest.mark.ci(after=7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_it_has_the_bits_of_separate_operations(device, dtype, name):
    # a norm's mean is exact here in any order of its sum
    case = Case(FORMS[name], 5, device, dtype, exact=True)
    query = case.run()
    for got, wanted in zip((query, *case.stored()), case.wanted(), strict=True):
        if dtype is torch.float32 and case.form.norm:
            # the root's last bit
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(got, wanted)


@pytest.mark.ci(after=7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_it_is_right(device, dtype, name):
    case = Case(FORMS[name], 7, device, dtype)
    query = case.run()
    error = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-6}[dtype]
    for got, wanted in zip((query, *case.stored()), case.wanted(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=error, atol=error)


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_it_writes_its_slots_alone(device, shares):
    case = Case(replace(FORMS["norms of heads"], kv_heads=4), 6, device, torch.float32, shares=shares)
    case.slots[2] = case.slots[5] = -1
    query = case.run()
    kept = torch.tensor([0, 1, 3, 4], device=device)
    assert query.isfinite().all(), "queries of rows that are not stored are made all the same"
    for got, wanted in zip(case.stored(kept), case.wanted()[1:], strict=True):
        torch.testing.assert_close(got, wanted[kept], rtol=1e-6, atol=1e-6)
    written = case.pool.isfinite().sum()
    assert written == 2 * len(kept) * case.form.kv_heads * case.form.head_dim


def test_angles_whose_columns_lie_apart(device):
    case = Case(FORMS["a part turned"], 6, device, torch.float32)
    wanted = case.run()
    case.cos, case.sin = (x.T.contiguous().T for x in (case.cos, case.sin))
    assert torch.equal(case.run(), wanted)


def test_a_row_depends_on_itself_alone(device):
    case = Case(FORMS["norms of heads"], 9, device, torch.bfloat16)
    query = case.run()
    keys, _ = case.stored()
    case.qkv, case.cos, case.sin, case.slots = (x[4:5] for x in (case.qkv, case.cos, case.sin, case.slots))
    assert torch.equal(case.run(), query[4:5])
    assert torch.equal(case.stored()[0], keys[4:5])


def test_no_tokens_and_what_it_does_not_take(device):
    case = Case(FORMS["norms of heads"], 2, device, torch.float32)
    with pytest.raises(BadInput, match="needs the weights"):
        prepare_qkv(case.qkv, case.cos, case.sin, case.keys, case.values, case.slots, case.form)
    with pytest.raises(BadInput, match="no contiguous product"):
        prepare_qkv(case.qkv[:, 1:], case.cos, case.sin, case.keys, case.values, case.slots, case.form, *case.weights)
    with pytest.raises(BadInput, match="are not of this form"):
        prepare_qkv(
            case.qkv, case.cos, case.sin, case.keys[:, :, 1:], case.values, case.slots, case.form, *case.weights
        )
    with pytest.raises(BadInput, match="at least 8"):
        prepare_qkv(
            case.qkv, case.cos[:, :4], case.sin[:, :4], case.keys, case.values, case.slots, case.form, *case.weights
        )
    with pytest.raises(BadInput, match="no even part"):
        prepare_qkv(
            case.qkv, case.cos, case.sin, case.keys, case.values, case.slots, QkvForm(8, 2, 16, 5), *case.weights
        )
    case.qkv, case.cos, case.sin, case.slots = (x[:0] for x in (case.qkv, case.cos, case.sin, case.slots))
    assert case.run().shape == (0, 8, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form", [QkvForm(32, 4, 128, 128, norm="head", eps=1e-6), QkvForm(16, 16, 128, 128, norm="row", eps=1e-5)]
)
def test_the_bits_of_a_row_at_every_number_of_rows(device, dtype, form):
    whole = Case(form, 2048, device, dtype)
    query = whole.run()
    keys, values = whole.stored()
    for first, last in ((0, 1), (777, 778), (100, 108), (1000, 1064), (512, 768)):
        part = Case(form, 2048, device, dtype)
        part.qkv, part.cos, part.sin = (x[first:last] for x in (whole.qkv, whole.cos, whole.sin))
        part.slots = whole.slots[first:last]
        assert torch.equal(part.run(), query[first:last])
        assert torch.equal(part.stored()[0], keys[first:last])
        assert torch.equal(part.stored()[1], values[first:last])
    for got, wanted in zip((query, keys, values), whole.wanted(), strict=True):
        # a mean whose last bit differs moves few values over the edge of a rounding
        far = (got.float() - wanted.float()).abs() > 4 * torch.finfo(dtype).eps * wanted.float().abs().amax(-1, True)
        assert not far.any()
        assert dtype is torch.float32 or (got != wanted).float().mean() < 0.01
