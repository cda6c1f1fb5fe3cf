"""Attention over tiles: right, and the same bits for a query alone, in a chunk and among other sequences."""

from __future__ import annotations

import pytest
import torch
from fdasync_transformers.fixed.attention import KEYS, attend

LENGTH = 3 * KEYS


def parts(heads, kv_heads, width, value_width, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, heads, LENGTH, width, generator=random),
        torch.randn(1, kv_heads, LENGTH, width, generator=random),
        torch.randn(1, kv_heads, LENGTH, value_width, generator=random),
    )


def mask_of(positions, first, length, window):
    keys = torch.arange(first, first + length)
    seen = (keys <= positions[:, None]) & (keys > positions[:, None] - window)
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None, None]


def exact(q, k, v, mask, scaling, sinks):
    k, v = (one.double().repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scaling + mask
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("window", [10_000, 70, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_a_query_has_the_same_bits_wherever_it_is(heads, with_sinks, window):
    q, k, v = parts(*heads, 24, 20)
    sinks = torch.randn(heads[0]) if with_sinks else None
    positions = torch.arange(LENGTH)
    whole = attend(q, k, v, mask_of(positions, 0, LENGTH, window), 0.3, sinks)
    wanted = exact(q, k, v, mask_of(positions, 0, LENGTH, window), 0.3, sinks)
    assert torch.allclose(whole.double(), wanted, atol=1e-5)
    for first, last in ((0, 1), (3, 40), (63, 66), (100, 101), (130, 192)):
        some = positions[first:last]
        # only the tiles that are seen, and one more behind them
        begin = max(0, first - window + 1) // KEYS * KEYS
        end = min(LENGTH, (last // KEYS + 2) * KEYS)
        keys, values = k[:, :, begin:end], v[:, :, begin:end]
        mask = mask_of(some, begin, end - begin, window)
        alone = attend(q[:, :, some], keys, values, mask, 0.3, sinks)
        assert torch.equal(alone, whole[:, :, some])
        # beside another sequence, under masks of both
        other = torch.randn_like(q[:, :, some])
        both = attend(
            torch.cat((other, q[:, :, some])),
            torch.cat((torch.randn_like(keys), keys)),
            torch.cat((torch.randn_like(values), values)),
            torch.cat((torch.zeros_like(mask), mask)),
            0.3,
            sinks,
        )
        assert torch.equal(both[1:], whole[:, :, some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(dtype):
    q, k, v = (one.to(dtype) for one in parts(4, 2, 24, 24))
    mask = mask_of(torch.arange(LENGTH), 0, LENGTH, LENGTH)
    got = attend(q, k, v, mask, 0.3)
    wide = attend(q.float(), k.float(), v.float(), mask, 0.3)
    assert got.dtype is dtype
    assert torch.equal(got, wide.to(dtype))


def test_sinks_far_above_the_scores_leave_what_is_left():
    """exp(sink - largest score) is past float32."""
    q, k, v = parts(2, 2, 8, 8)
    mask, sinks = mask_of(torch.arange(LENGTH), 0, LENGTH, LENGTH), torch.full((2,), 89.5)
    got = attend(q * 0, k, v * 1e20, mask, 1.0, sinks)
    wanted = exact(q * 0, k, v * 1e20, mask, 1.0, sinks)
    assert wanted.abs().min() > 0
    assert torch.allclose(got.double(), wanted, rtol=1e-3, atol=1e-22)
