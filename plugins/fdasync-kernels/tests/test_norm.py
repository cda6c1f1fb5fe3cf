"""The RMSNorm kernel against float64 and against torch's separate operations: `layer/norm.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.layer.norm import MOST_COLUMNS, add_rms_norm, rms_norm, tile_of

from fdasync.errors import BadInput

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WEIGHTED = ["normed", "product", "one_plus"]
EPS = 1e-5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_torch(x: torch.Tensor, weight: torch.Tensor | None, rounding: str) -> torch.Tensor:
    """As the library's classes compute it."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    if rounding == "scale":
        return x * scale.to(x.dtype)
    normed = x.float() * scale
    if weight is None:
        return normed.to(x.dtype)
    if rounding == "normed":
        return weight * normed.to(x.dtype)
    factor = weight.float() if rounding == "product" else 1.0 + weight.float()
    return (factor * normed).to(x.dtype)


def in_float64(x: torch.Tensor, weight: torch.Tensor | None, rounding: str) -> torch.Tensor:
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    if weight is None:
        return normed
    return normed * (weight.double() + (rounding == "one_plus"))


def check(ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rounding: str) -> None:
    assert ours.dtype is x.dtype
    assert ours.is_contiguous()
    exact = in_float64(x, weight, rounding)
    # each rounding is half a step; the weighted product has two, and the mean in float32 has a few of its own
    torch.testing.assert_close(ours.double(), exact, rtol=2 * torch.finfo(x.dtype).eps + 5e-7, atol=1e-30)
    library = in_torch(x, weight, rounding)
    if x.dtype is not torch.float32:
        # the order of the mean's sum alone differs, which a narrow dtype seldom shows
        assert int((ours != library).sum()) <= max(1, ours.numel() // 200)


@pytest.mark.ci(after=18)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", [*WEIGHTED, "none", "scale"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (7, 96), (33, 16), (3, 700), (5, 1)])
def test_it_norms_as_the_library_does(device, dtype, rounding, rows, columns):
    x = normal(rows, columns, seed=rows).to(device, dtype)
    weight = normal(columns, seed=1).to(device, dtype) if rounding in WEIGHTED else None
    check(rms_norm(x, weight, EPS, rounding=rounding), x, weight, rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_all_sizes(device, dtype):
    largest = 1e2 if dtype is torch.float16 else 1e12
    sizes = torch.tensor([1e-3 if dtype is torch.float16 else 1e-12, 1.0, largest, 0.0])
    x = (normal(4, 48) * sizes[:, None]).to(device, dtype)
    weight = normal(48, seed=1).to(device, dtype)
    ours = rms_norm(x, weight, EPS)
    check(ours, x, weight, "normed")
    assert not ours[3].any()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["normed", "scale"])
def test_the_residual_sum_is_torchs_and_the_norm_that_of_the_sum(device, dtype, rounding):
    residual, x = (normal(2, 5, 40, seed=seed).to(device, dtype) for seed in (2, 3))
    weight = normal(40, seed=1).to(device, dtype) if rounding == "normed" else None
    total, normed = add_rms_norm(residual, x, weight, EPS, rounding=rounding)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(total, weight, EPS, rounding=rounding))
    check(normed, total, weight, rounding)


def test_strided_rows(device):
    weight = normal(24, seed=1).to(device)
    wide = normal(1, 6, 4, 40).to(device)
    # slices of rows, heads before tokens, columns that do not lie beside each other, one row of a wider tensor
    for x in (wide[..., 8:32], wide[..., :24].transpose(1, 2), wide[..., ::2][..., :20], wide[:, :1, :1, 3:27]):
        mine = weight[: x.shape[-1]].contiguous()
        assert torch.equal(rms_norm(x, mine, EPS), rms_norm(x.contiguous(), mine, EPS))
        total, normed = add_rms_norm(x, x, mine, EPS)
        assert torch.equal(total, x + x)
        assert torch.equal(normed, rms_norm(x + x, mine, EPS))
    assert rms_norm(wide[:0, ..., :24], weight, EPS).shape == (0, 6, 4, 24)


def test_a_weight_of_another_dtype(device):
    x, weight = normal(3, 32).to(device, torch.bfloat16), normal(32, seed=1).to(device)
    for rounding in ("product", "one_plus"):
        check(rms_norm(x, weight, EPS, rounding=rounding), x, weight, rounding)


def test_the_tile_follows_from_the_row_alone():
    for columns, tile in {64: (32, 64, 8), 128: (16, 128, 8), 2048: (1, 2048, 8), 2880: (1, 4096, 16)}.items():
        assert tile_of(columns, 2) == tile
        assert tile_of(columns, 4) == (*tile[:2], 16)
    assert all(tile_of(columns, 4).warps <= 16 for columns in range(1, MOST_COLUMNS, 511))


def test_bad_input_is_refused(device):
    x, weight = torch.zeros((2, 8), device=device), torch.zeros(8, device=device)

    def ask(x=x, weight=weight, **others):
        rms_norm(x, weight, EPS, **others)

    for field, call in {
        "x": [lambda: ask(x.double()), lambda: ask(x[0, 0]), lambda: ask(torch.zeros((1, MOST_COLUMNS + 1)))],
        "weight": [
            lambda: ask(weight=weight[:4]),
            lambda: ask(weight=None),
            lambda: ask(rounding="none"),
            lambda: ask(weight=weight.half()),
            lambda: ask(weight=weight.double(), rounding="product"),
            lambda: ask(weight=torch.zeros(16, device=device)[::2]),
        ],
        "rounding": [lambda: ask(rounding="up")],
        "residual": [
            lambda: add_rms_norm(x[:1], x, weight, EPS),
            lambda: add_rms_norm(x.half(), x, weight, EPS),
        ],
    }.items():
        for refused in call:
            with pytest.raises(BadInput) as caught:
                refused()
            assert caught.value.field == field


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [128, 2048, 2880])
def test_the_bits_of_a_row_alone_in_a_batch_and_padded(device, dtype, columns):
    x = torch.randn((1024, columns), device=device).to(dtype)
    weight = torch.randn(columns, device=device).to(dtype)
    whole = rms_norm(x, weight, EPS)
    total, normed = add_rms_norm(x, x, weight, EPS)
    check(whole, x, weight, "normed")
    for count in (1, 2, 3, 16, 17, 64, 255):
        assert torch.equal(rms_norm(x[:count], weight, EPS), whole[:count])
        assert torch.equal(rms_norm(x[500 : 500 + count], weight, EPS), whole[500 : 500 + count])
        padded = torch.cat([x[:count], torch.full((64, columns), float("nan"), device=device, dtype=dtype)])
        assert torch.equal(rms_norm(padded, weight, EPS)[:count], whole[:count])
        one, other = add_rms_norm(x[:count], x[:count], weight, EPS)
        assert torch.equal(one, total[:count])
        assert torch.equal(other, normed[:count])
    assert torch.equal(rms_norm(total, weight, EPS), normed)


@pytest.mark.gpu
def test_one_kernel_for_all_numbers_of_rows_and_a_graph_replays_it(device):
    from fdasync_kernels.layer.norm import _norm_kernel

    x, weight = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((64, 2048), (2048,)))
    rms_norm(x, weight, EPS)
    kernels = [len(cache[0]) for cache in _norm_kernel.device_caches.values()]
    for rows in (1, 2, 16, 33):
        rms_norm(x[:rows], weight, EPS)
    assert [len(cache[0]) for cache in _norm_kernel.device_caches.values()] == kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normed = rms_norm(x, weight, EPS)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(normed, rms_norm(x, weight, EPS))
