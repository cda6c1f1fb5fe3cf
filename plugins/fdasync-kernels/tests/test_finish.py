"""Sums of experts, the residual stream and the next norm in one kernel: `layer/finish.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.layer.finish import Norm, add_norm, finish_experts, norm_rows
from layer_reference import even, rms_norm

from fdasync.errors import BadInput

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EXPERTS = 6


def rows(count: int, size: int, device: torch.device, dtype: torch.dtype, seed: int, exact: bool = False):
    """Rows of a wider matrix, poison beside them."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.full((count, size + 8), float("nan"))
    wide[:, :size] = even((count, size), draw) if exact else torch.randn((count, size), generator=draw)
    return wide.to(device, dtype)[:, :size]


def experts(count: int, k: int, size: int, device: torch.device, dtype: torch.dtype):
    """Parts [T, k, H] with other experts' ids among theirs, whose parts are poison."""
    draw = torch.Generator().manual_seed(k)
    ids = torch.randint(0, EXPERTS, (count, k), generator=draw)
    ids[0, 0] = EXPERTS
    ids[-1, -1] = -1
    if count > 2:
        ids[1] = EXPERTS + 3
    parts = torch.randn((count, k, size + 8), generator=draw)
    parts[(ids < 0) | (ids >= EXPERTS)] = float("nan")
    return parts.to(device, dtype)[..., :size], ids.to(device)


def summed(parts: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """In slot order, other experts' parts left out."""
    total = torch.zeros(parts.shape[0], parts.shape[2], dtype=dtype, device=parts.device)
    for slot in range(parts.shape[1]):
        ours = ((ids[:, slot] >= 0) & (ids[:, slot] < EXPERTS))[:, None]
        total = torch.where(ours, total + parts[:, slot].to(dtype), total)
    return total


def a_norm(size: int, device: torch.device, dtype: torch.dtype, once: bool = False) -> Norm:
    weight = 1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(9))
    return Norm(weight.to(device, dtype), 1e-5, once)


def close(got: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == wanted.dtype
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 50])
def test_add_and_norm_have_the_bits_of_separate_operations(device, dtype, size, once):
    block = rows(3, size, device, dtype, 1, exact=True)
    residual = rows(3, size, device, dtype, 2, exact=True)
    norm = a_norm(size, device, dtype, once)
    hidden, normed = add_norm(block, residual, norm)
    assert torch.equal(hidden, residual + block)
    # the mean is exact here in any order of its sum, if its factor is
    wanted = rms_norm(residual + block, norm.weight, norm.eps, once)
    if size == 64:
        close(normed, wanted)
    else:
        assert normed is not None
        torch.testing.assert_close(normed, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert normed is not None
    assert torch.equal(norm_rows(hidden, norm), normed)
    alone, nothing = add_norm(block, residual, None)
    assert torch.equal(alone, hidden)
    assert nothing is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shared", ["", "added", "gated"])
def test_experts_have_the_bits_of_separate_operations(device, dtype, ids_dtype, shared):
    parts, ids = experts(4, 3, 40, device, dtype)
    residual = rows(4, 40, device, dtype, 3)
    norm = a_norm(40, device, dtype)
    more = rows(4, 40, device, dtype, 4) if shared else None
    gate = rows(4, 1, device, dtype, 5).contiguous() if shared == "gated" else None
    hidden, normed = finish_experts(parts, ids.to(ids_dtype), EXPERTS, residual, norm, shared=more, shared_gate=gate)
    block = summed(parts, ids).to(dtype)
    if more is not None:
        block = block + (more if gate is None else torch.sigmoid(gate) * more)
    wanted = residual + block
    if gate is not None:
        torch.testing.assert_close(hidden, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert torch.equal(hidden, wanted)
    assert normed is not None
    torch.testing.assert_close(
        normed.float(), rms_norm(hidden, norm.weight, norm.eps).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right(device, dtype):
    parts, ids = experts(5, 4, 72, device, dtype)
    residual, shared = (rows(5, 72, device, dtype, seed) for seed in (3, 4))
    norm = a_norm(72, device, dtype)
    hidden, normed = finish_experts(parts, ids, EXPERTS, residual, norm, shared=shared)
    wanted = summed(parts, ids, torch.float64) + shared.double() + residual.double()
    error = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(hidden.double(), wanted, rtol=error, atol=error)
    assert normed is not None
    torch.testing.assert_close(
        normed.double(), rms_norm(wanted, norm.weight.double(), norm.eps), rtol=error, atol=error
    )


def test_a_token_of_no_experts_keeps_its_stream(device):
    parts, ids = experts(3, 3, 32, device, torch.float32)
    residual = rows(3, 32, device, torch.float32, 3)
    hidden, _ = finish_experts(parts, ids, EXPERTS, residual, None)
    assert torch.equal(hidden[1], residual[1])


def test_parts_of_padding_rows_count_for_nothing(device):
    parts, ids = experts(4, 3, 32, device, torch.float32)
    residual = rows(4, 32, device, torch.float32, 3)
    wanted, _ = finish_experts(parts, ids, EXPERTS, residual, None)
    live = torch.tensor([5, 0, -1, 7], device=device)
    parts[2] = float("nan")
    hidden, _ = finish_experts(parts, ids, EXPERTS, residual, None, live=live)
    assert torch.equal(hidden[2], residual[2])
    assert torch.equal(hidden[live >= 0], wanted[live >= 0])


def test_a_row_depends_on_itself_alone(device):
    parts, ids = experts(6, 3, 40, device, torch.bfloat16)
    residual = rows(6, 40, device, torch.bfloat16, 3)
    norm = a_norm(40, device, torch.bfloat16)
    hidden, normed = finish_experts(parts, ids, EXPERTS, residual, norm)
    one, its_norm = finish_experts(parts[3:4], ids[3:4], EXPERTS, residual[3:4], norm)
    assert normed is not None
    assert its_norm is not None
    assert torch.equal(one, hidden[3:4])
    assert torch.equal(its_norm, normed[3:4])


def test_no_tokens_and_what_it_does_not_take(device):
    parts, ids = experts(2, 3, 32, device, torch.float32)
    residual = rows(2, 32, device, torch.float32, 3)
    norm = a_norm(32, device, torch.float32)
    assert finish_experts(parts[:0], ids[:0], EXPERTS, residual[:0], norm)[0].shape == (0, 32)
    assert add_norm(residual[:0], residual[:0], norm)[0].shape == (0, 32)
    with pytest.raises(BadInput, match="with ids"):
        finish_experts(parts, ids[:, :2], EXPERTS, residual, norm)
    with pytest.raises(BadInput, match="residual"):
        add_norm(residual, residual.half(), norm)
    with pytest.raises(BadInput, match="beside each other"):
        add_norm(parts[..., 0].T.contiguous().T, residual[:, :3], None)
    with pytest.raises(BadInput, match="shared_gate"):
        finish_experts(parts, ids, EXPERTS, residual, norm, shared=residual, shared_gate=residual)
    with pytest.raises(BadInput, match="weight of 16"):
        norm_rows(residual, a_norm(16, device, torch.float32))
    with pytest.raises(BadInput, match="rows of"):
        norm_rows(torch.empty((1, 20000), device=device), norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2048, 2880])
def test_the_bits_of_a_row_at_every_number_of_rows(device, dtype, size):
    parts, ids = experts(2048, 8, size, device, dtype)
    residual = rows(2048, size, device, dtype, 3)
    norm = a_norm(size, device, dtype)
    hidden, normed = finish_experts(parts, ids, EXPERTS, residual, norm)
    plain, plain_normed = add_norm(residual, residual, norm)
    assert normed is not None
    assert plain_normed is not None
    assert torch.equal(hidden, residual + summed(parts, ids).to(dtype))
    for first, last in ((0, 1), (777, 778), (100, 108), (1000, 1064), (512, 768)):
        one, its_norm = finish_experts(parts[first:last], ids[first:last], EXPERTS, residual[first:last], norm)
        assert torch.equal(one, hidden[first:last])
        assert its_norm is not None
        assert torch.equal(its_norm, normed[first:last])
        one, its_norm = add_norm(residual[first:last], residual[first:last], norm)
        assert torch.equal(one, plain[first:last])
        assert its_norm is not None
        assert torch.equal(its_norm, plain_normed[first:last])
    wanted = rms_norm(hidden, norm.weight, norm.eps)
    far = (normed.float() - wanted.float()).abs() > 8 * torch.finfo(dtype).eps * wanted.float().abs() + 1e-30
    assert not far.any()
    assert dtype is torch.float32 or (normed != wanted).float().mean() < 0.01
