"""What the sampler's kernels count with: whole-number masses, and the bounds between which a cut stands.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fdasync_kernels.sampling import narrow, tile
from fdasync_kernels.sampling.edits import NO_EDITS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# numpy computes for the interpreter, and says so where infinities meet
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
UNIT_BITS = 44


@triton.jit
def _mass_kernel(x, best, scale, shift, into, count: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, count)
    values = tl.load(x + place)
    top, by = tl.load(best), tl.load(scale)
    logs = tile.scaled(values, top, by)
    tl.store(into + place, tile.mass_of(values, logs, tile.reach_of(top, by), shift))


def masses(x: np.ndarray, best: float, scale: float = 1.0, shift: int = UNIT_BITS) -> np.ndarray:
    count = triton.next_power_of_2(len(x))
    values = torch.full((count,), -math.inf)
    values[: len(x)] = torch.from_numpy(x)
    into = torch.full((count,), -77, dtype=torch.int64, device=DEVICE)
    _mass_kernel[(1,)](
        values.to(DEVICE), torch.tensor([best], device=DEVICE),
        torch.tensor([scale], dtype=torch.float64, device=DEVICE), shift, into, count=count,
    )  # fmt: skip
    assert (into[len(x) :] == 0).all()
    found: np.ndarray = into[: len(x)].cpu().numpy()
    return found


@pytest.mark.parametrize("shift", [30, UNIT_BITS, 52])
@pytest.mark.parametrize("scale", [1.0, 0.013, 1.7])
def test_a_mass_is_the_rounded_exponential(scale: float, shift: int) -> None:
    random = np.random.default_rng(shift)
    x = (random.random(4096) * -44.0 / scale + 3.0).astype(np.float32)
    x[0], best = 3.25, 3.25
    found = masses(x, best, scale, shift)
    exact = np.exp((x.astype(np.longdouble) - np.longdouble(best)) * np.longdouble(scale)) * np.longdouble(2) ** shift
    assert found[0] == 2**shift
    # where the rounding is close, an error of a log of 40 in its last bits decides
    assert np.abs(found - exact).max() <= 0.5 + 2.0 ** (shift - 50)
    assert (found >= 0).all()


def test_what_has_no_probability_has_no_mass() -> None:
    x = np.array([1.0, -np.inf, np.nan, -60.0, -3e38, 1.0 - 37.5], np.float32)
    assert masses(x, 1.0, shift=52).tolist() == [2**52, 0, 0, 0, 0, 0]
    # a temperature so small, and one so large
    assert masses(np.array([1.0, 1.0 - 2.0**-23], np.float32), 1.0, 1e250).tolist() == [2**UNIT_BITS, 0]
    assert masses(np.array([2.0, -3e38], np.float32), 2.0, 1e-300).tolist() == [2**UNIT_BITS] * 2


@pytest.mark.parametrize("best", [math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_mass(best: float) -> None:
    assert not masses(np.array([1.0, -np.inf, np.inf, 3e38], np.float32), best).any()


def bounds(x: torch.Tensor, top_p: float, scale: float = 1.0, top_k: int = 0) -> tuple[float, float, bool]:
    """Of one row, after three passes, and whether few ids are certain to be between."""
    width, span, few = x.shape[1], 1024, (64, 65, 66)
    spans, tiles = -(-width // span), -(-width // tile.TILE)
    ints = torch.tensor([[0, -1, -1, -1, 1, 1, top_k, -1]], device=DEVICE)
    floats = torch.tensor([[scale, 0.5, top_p, -math.inf]], dtype=torch.float64, device=DEVICE)
    x = x.to(DEVICE)
    padded = torch.nn.functional.pad(x, (0, tiles * tile.TILE - width), value=-math.inf)
    best = padded.view(tiles, tile.TILE).amax(dim=1)
    chunks = padded.view(-1, tile.CHUNK).amax(dim=1)
    keys = chunks.view(torch.int32)
    chunk_best = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).long() << 32
    found = torch.full((1, 2), math.nan, device=DEVICE)
    close = torch.full((1,), -77, dtype=torch.int32, device=DEVICE)
    sums = torch.full((1, spans, narrow.PIVOTS), math.nan, device=DEVICE)
    sizes: dict[str, Any] = {"tiles": tiles, "padded": triton.next_power_of_2(tiles), "spans": spans}
    for number in range(3):
        first = number == 0
        narrow.narrow_kernel[(spans, 1)](
            x, x.stride(0), width, ints, floats, best, found, close, sums, *NO_EDITS,
            first=first, span=span, **sizes,
        )  # fmt: skip
        narrow.bounds_kernel[(1,)](
            width, ints, floats, chunk_best, best, found, close, sums,
            chunks=tile.TILE // tile.CHUNK, padded_spans=triton.next_power_of_2(spans), first=first, few=few[number],
            **sizes,
        )  # fmt: skip
    return float(found[0, 0]), float(found[0, 1]), int(close[0]) == 1


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.31, 0.95, 0.9999])
def test_a_nucleus_ends_between_its_bounds(top_p: float, spread: float) -> None:
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(1, 9001)) * spread).float()
    low, high, close = bounds(x, top_p)
    values = np.sort(x[0].double().numpy())[::-1]
    p = np.exp(values - values[0])
    last = int(np.count_nonzero(p.cumsum() - p < top_p * p.sum())) - 1
    assert low <= values[last] < high
    # of 9,001 ids, whatever the spread is
    assert np.count_nonzero((values >= low) & (values < high)) < 66
    assert close


@pytest.mark.parametrize("top_k", [1, 50, 71])
def test_a_top_k_ends_at_or_above_its_bound(top_k: int) -> None:
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(1, 9001))).float()
    low, high, _ = bounds(x, 1.0, top_k=top_k)
    chunks = torch.nn.functional.pad(x, (0, 71 * 128 - 9001), value=-math.inf).view(71, 128).amax(dim=1)
    assert (low, high) == (float(chunks.sort(descending=True).values[top_k - 1]), math.inf)


def test_nothing_is_between_bounds_of_no_cut() -> None:
    assert bounds(torch.zeros((1, 300)), 1.0)[:2] == (math.inf, -math.inf)
