"""A row's bits are the same whatever the number of rows, its place among them, and the kernel that is taken.

Products are in `test_linear.py`, attention in `test_attention.py` and its neighbours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fdasync_kernels.experts.chain import experts
from fdasync_kernels.layer.finish import Norm, add_norm, finish_experts, norm_rows
from fdasync_kernels.layer.gate import gated
from fdasync_kernels.layer.norm import add_rms_norm, rms_norm
from fdasync_kernels.layer.qkv import QkvForm, prepare_qkv
from fdasync_kernels.layer.rotary import Style, rotate
from fdasync_kernels.layer.sums import row_mean, row_sum
from fdasync_kernels.router.product import router_logits
from fdasync_kernels.router.route import route
from sampled_rows import WAYS, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DTYPES = [torch.bfloat16, torch.float32]
EPS = 1e-6
COUNTS = (1, 2, 3, 7, 16, 64, 100, 257, 1000)
# rows of norms, gates and rotary embeddings, of a router, of experts and of a sampler
ROWS, ROUTED, TOKENS, SAMPLED = 1000, 8192, 4096, 256
VOCABS = (1000, 151936)
ALIKE = ("greedy", "cold nucleus", "top 1")


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    # rows of many sizes
    sizes = torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=draw, device=device) * 8 - 4
    return (torch.randn(shape, generator=draw, device=device) * sizes.exp2()).to(dtype)


def assert_same(call: Callable[[slice], Iterable[torch.Tensor]], most: int) -> None:
    """What `call` makes of some rows is what it makes of them among all."""
    whole = tuple(call(slice(0, most)))
    for count in (*(count for count in COUNTS if count < most), most):
        for begin in sorted({0, min(5, most - count), most - count}):
            part = slice(begin, begin + count)
            for number, (found, wanted) in enumerate(zip(call(part), whole, strict=True)):
                assert torch.equal(found, wanted[part]), f"result {number} of rows {part}"


@pytest.mark.ci
def test_norms_share_a_row_out_to_threads_alike():
    """Compiled for Hopper without one: who adds what decides the order of a sum."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "support/compile_sums.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = defaultdict(set)
    kernels = defaultdict(set)
    for dtype, size, kernel, *share in map(str.split, done.stdout.splitlines()):
        shares[dtype, size].add(tuple(share))
        kernels[dtype, size].add(kernel)
    assert all(len(found) == 1 for found in shares.values()), shares
    assert all(len(found) == 2 for found in kernels.values())
    assert len(shares) == 2 * (3 + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("size", [64, 256, 1024, 2048, 2880, 4096, 7168])
def test_norms_of_rows(device, dtype, size):
    x, before = (random(ROWS, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, device=device)
    total, normed = add_rms_norm(before, x, weight, EPS)
    for once in (False, True):
        rounding, norm = "product" if once else "normed", Norm(weight, EPS, once)
        normed = rms_norm(total, weight, EPS, rounding=rounding)
        assert torch.equal(norm_rows(total, norm), normed)
        assert all(map(torch.equal, add_norm(x, before, norm), (total, normed)))
        assert all(map(torch.equal, add_rms_norm(before, x, weight, EPS, rounding=rounding), (total, normed)))
    assert_same(lambda part: add_norm(x[part], before[part], norm), ROWS)
    assert_same(lambda part: add_rms_norm(before[part], x[part], weight, EPS), ROWS)
    # rows of a wider tensor, which no vector of 16 bytes reads
    wide = torch.empty(ROWS, size + 3, dtype=dtype, device=device)[:, 1 : 1 + size].copy_(total)
    assert torch.equal(rms_norm(wide, weight, EPS, rounding="product"), normed)
    assert torch.equal(norm_rows(wide, norm), normed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [QkvForm(32, 4, 128, 128), QkvForm(16, 2, 64, 32), QkvForm(4, 1, 256, 64, True),
                                  QkvForm(32, 32, 128, 128, full_precision=True)], ids=str)  # fmt: skip
def test_norms_of_heads_and_rotary(device, dtype, form):
    rows, dim = ROWS, form.head_dim
    qkv = random(rows, form.width, dtype=dtype, device=device)
    slots = torch.arange(rows, device=device)
    weights = [random(dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    form = QkvForm(**{**vars(form), "norm": "head", "eps": EPS})

    def prepared(part: slice, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = torch.zeros(2, (rows + 15) // 16, 16, form.kv_heads, dim, dtype=dtype, device=device)
        query = prepare_qkv(qkv[part], cos[part], sin[part], keys, values, slots[part], form, *weights)
        return query, *(pool.flatten(0, 1)[part] for pool in (keys, values))

    cos, sin = (random(rows, form.rotary_dim // 2, dtype=dtype, device=device, seed=seed) for seed in (3, 4))
    assert_same(lambda part: prepared(part, cos, sin), rows)
    # unturned they are the norms of `norm.py`
    query, keys, _ = prepared(slice(0, rows), torch.ones_like(cos), torch.zeros_like(sin))
    heads = qkv.view(rows, -1, dim)
    for found, of, weight in ((query, heads[:, : form.heads], weights[0]),
                              (keys, heads[:, form.heads : form.heads + form.kv_heads], weights[1])):  # fmt: skip
        assert torch.equal(found, rms_norm(of, weight, EPS))
    # and turned what `rotary.py` makes of those
    query, keys, _ = prepared(slice(0, rows), cos, sin)
    normed = [rms_norm(of, weight, EPS) for of, weight in
              ((heads[:, : form.heads], weights[0]), (heads[:, form.heads : -form.kv_heads], weights[1]))]  # fmt: skip
    pairs = "neighbours" if form.interleaved else "halves"
    style = Style(pairs, pairs, "pair", wide=form.full_precision)
    turned = rotate(normed[0], normed[1], cos, sin, style)
    assert all(map(torch.equal, (query, keys), turned))
    assert_same(lambda part: rotate(normed[0][part], normed[1][part], cos[part], sin[part], style), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_sums_of_rows(device, dtype):
    both = random(ROWS, 1536, dtype=dtype, device=device)
    for activation in ("silu", "gelu", "gelu_tanh"):
        assert_same(lambda part, kind=activation: [gated(both[part, :768], both[part, 768:], activation=kind)], ROWS)
    for columns in (1, 100, 1536):
        x = both[:, :columns]
        assert_same(lambda part, x=x: [row_sum(x[part]), row_mean(x[part], dtype=torch.float32)], ROWS)
        assert torch.equal(row_sum(x.contiguous()), row_sum(x))
    assert_same(
        lambda part: [row_mean(both.flatten()[: ROWS * 1536 // 16000 * 16000].view(-1, 16000)[part])],
        ROWS * 1536 // 16000,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.bfloat16,) * 2, (torch.float32,) * 2,
                                                     (torch.bfloat16, torch.float32)])  # fmt: skip
@pytest.mark.parametrize(("num_experts", "width"), [(128, 2048), (60, 1000), (256, 7168)])
def test_a_router_and_its_choice(device, dtype, weight_dtype, num_experts, width):
    x = random(ROUTED, width, dtype=dtype, device=device)
    weight = (random(num_experts, width, dtype=torch.float32, device=device) / width**0.5).to(weight_dtype)

    def routed(part: slice) -> Iterable[torch.Tensor]:
        logits = router_logits(x[part], weight, rounded=True)
        return (logits, *route(logits, 8, weights_dtype=dtype))

    assert_same(routed, ROUTED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_whole_output_of_experts(device, dtype, transposed):
    most, num_experts, width, inner, k = TOKENS, 64, 1024, 384, 8
    hidden, before = (random(most, width, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    up, down = (torch.randn(num_experts, rows, columns, device=device).mul_(0.05).to(dtype)
                for rows, columns in ((2 * inner, width), (width, inner)))  # fmt: skip
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    draw = torch.Generator(device).manual_seed(3)
    # some experts are chosen much more than others
    best = (
        torch.randn(most, num_experts, generator=draw, device=device) + torch.arange(num_experts, device=device) / 20
    ).topk(k)
    ids, weights = best.indices, best.values.softmax(-1).to(dtype)
    norm = Norm(random(width, dtype=dtype, device=device), EPS)

    def output(part: slice) -> Iterable[torch.Tensor]:
        found = experts(hidden[part], ids[part], weights[part], up, down, transposed=transposed)
        parts = experts(hidden[part], ids[part], weights[part], up, down, transposed=transposed, parts=True)
        stream, normed = finish_experts(parts, ids[part], num_experts, before[part], norm)
        # the sum of the slots and the residual stream, in one kernel or in two
        assert all(map(torch.equal, (stream, normed), add_norm(found, before[part], norm)))
        return found, parts, stream, normed

    assert_same(output, most)
    order = torch.randperm(most, generator=draw, device=device)
    moved = experts(hidden[order], ids[order], weights[order], up, down, transposed=transposed)
    assert torch.equal(moved, next(iter(output(slice(0, most))))[order])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", VOCABS)
def test_log_probs_of_sampled_tokens(device, dtype, width):
    rows = SAMPLED
    logits = (torch.randn(rows, width, generator=torch.Generator(device).manual_seed(1), device=device) * 3).to(dtype)
    noise = torch.rand(rows, generator=torch.Generator().manual_seed(2))
    ways = [list(WAYS)[row % len(WAYS)] for row in range(rows)]
    # all ways in one batch, and a row of each alone
    assert_same(lambda part: sampled(logits[part], ways[part], noise[part]), rows)
    for row in range(len(WAYS)):
        alone = sampled(logits[row : row + 1], ways[row : row + 1], noise[row : row + 1])
        among = sampled(logits, ways, noise)
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, among, strict=True)), ways[row]
    # a token's raw log-prob is the same whichever way took it
    found = [sampled(logits, [way] * rows, noise)[:2] for way in ALIKE]
    for other in found[1:]:
        same = other[0] == found[0][0]
        assert float(same.float().mean()) > 0.9
        assert torch.equal(other[1][same], found[0][1][same])
