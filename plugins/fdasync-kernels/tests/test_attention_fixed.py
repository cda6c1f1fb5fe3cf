"""The fixed order of attention: right, and the same bits from every kernel, whatever runs beside a query.

Triton's interpreter multiplies by numpy, whose sums of products depend on shapes. So queries, keys and values here are
such that every tile's products are exact, and what is not (exponents, shrinking, joins) is done number by number: then
bits show in which order tiles and parts were added up, and are held against `spec`, which says it once more.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_layers import Shape
from attention_reference import Case, assert_close, make_case, reference
from fdasync_kernels.attention.decode import attend_decode, decode_launch, decode_workspace
from fdasync_kernels.attention.fixed import Grain, grain_of, most_parts
from fdasync_kernels.attention.latent import LatentLaunch, attend_latents
from fdasync_kernels.attention.packed import PackedLayout, attend_packed
from fdasync_kernels.attention.prefill import prefill_launch
from fdasync_kernels.attention.tile import LOG2E, Launch
from fixed_attention import SCALE, decode, prefill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

FP16 = torch.float16
GRAIN = Grain(16, 32)
SHAPES = {
    "full": Shape(heads=2, kv_heads=2, dtype=FP16),
    "chunk, sinks": Shape(heads=2, reach=("chunk", 41), sinks=True, dtype=FP16),
    "two parts of a head": Shape(heads=3, key_dim=24, value_dim=16, dtype=FP16),
    "latent": Shape(heads=3, key_dim=48, value_dim=32, latent=True, dtype=FP16),
    "full, sinks": Shape(heads=3, sinks=True, dtype=FP16),
    "window": Shape(heads=2, reach=("window", 37), dtype=FP16),
    "window of one, sinks": Shape(heads=2, reach=("window", 1), sinks=True, dtype=FP16),
    "from": Shape(heads=2, reach=("from", 37), dtype=FP16),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def exact_layer(shape: Shape, lengths: list[int], device: torch.device) -> tuple[Case, torch.Tensor | None]:
    """Keys of one 1 in the first 16 dimensions, values of small whole numbers: a tile's products are exact."""
    case = make_case(
        device, lengths, kv_heads=shape.kv_heads, key_dim=shape.key_dim, value_dim=shape.value_dim,
        latent=shape.latent, dtype=shape.dtype,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(11)
    for number, slots in enumerate(case.slots):
        key = torch.nn.functional.one_hot(
            torch.randint(16, (len(slots), shape.kv_heads), generator=draw), shape.key_dim
        )
        value = torch.randint(-7, 8, (len(slots), shape.kv_heads, shape.value_dim), generator=draw)
        if shape.latent:
            value = key[..., : shape.value_dim]
        case.flat_keys[number], case.flat_values[number] = key.to(shape.dtype), value.to(shape.dtype)
        where = (slots // 4, slots % 4)
        case.keys[where] = case.flat_keys[number].to(device)
        if case.values is not None:
            case.values[where] = case.flat_values[number].to(device)
    return case, torch.randn(shape.heads, generator=draw).to(device) if shape.sinks else None


def exact_query(shape: Shape, rows: int, device: torch.device) -> torch.Tensor:
    """Whole numbers of 5/8, up to 6: a tile's weights, which are multiples of 2 ** -14, add up exactly."""
    draw = torch.Generator().manual_seed(rows)
    query = torch.randint(-6, 7, (rows, shape.heads, shape.key_dim), generator=draw) * 0.625
    return query.to(shape.dtype).to(device)


@triton.jit
def _probe(numbers, out):  # type: ignore[no-untyped-def]
    x = tl.load(numbers)
    tl.store(out, tl.fma(x, x, -1.0))


@functools.cache
def fuses() -> bool:
    """Whether this version's interpreter has a fused multiplication; old ones round the product too."""
    number, out = torch.tensor([1 + 2**-12]), torch.empty(1)
    _probe[(1,)](number, out)
    return bool(out.item() == 2**-11 + 2**-24)


def fma(a: Any, b: Any, c: Any) -> Any:
    if fuses():
        return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)
    return (a * b + c).astype(np.float32)


def first_seen(kind: str, size: int, position: int) -> int:
    """The first key that a query sees."""
    if kind == "chunk":
        return position // size * size
    return {"full": 0, "window": max(0, position - size + 1), "from": min(position, size)}[kind]


def spec(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, number: int, position: int, grain: Grain
) -> torch.Tensor:
    """One query in the fixed order, in float32 by numpy: `fixed.py` written down once more."""
    f32 = np.float32
    kind, size = shape.reach
    low = first_seen(kind, size, position)
    group = shape.heads // shape.kv_heads
    keys = case.flat_keys[number].float().repeat_interleave(group, 1).numpy()
    values = case.flat_values[number].float().repeat_interleave(group, 1).numpy()
    heads = np.arange(shape.heads)
    scale = f32(SCALE * LOG2E)
    best, total = np.full(shape.heads, -np.inf, f32), np.zeros(shape.heads, f32)
    sums = np.zeros((shape.heads, shape.value_dim), f32)
    for part in range(low // grain.part, position // grain.part + 1):
        peak, weight, mine = np.full_like(best, -np.inf), np.zeros_like(total), np.zeros_like(sums)
        for start in range(part * grain.part, (part + 1) * grain.part, grain.keys):
            seen = np.arange(max(start, low), min(start + grain.keys, position + 1))
            if not len(seen):
                continue
            logits = np.einsum("hd,nhd->hn", query.float().numpy(), keys[seen])
            above = np.maximum(peak, logits.max(1) * scale)
            raw = torch.from_numpy(np.exp2(fma(logits, scale, -above[:, None])))
            weights, shrink = raw.to(shape.dtype).float().numpy(), np.exp2(peak - above)
            weight = weight * shrink + weights.sum(1)
            mine = mine * shrink[:, None] + np.einsum("hn,nhd->hd", weights, values[seen])
            peak = above
        above = np.maximum(best, peak)
        keep, grow = np.exp2(best - above), np.exp2(peak - above)
        total = fma(total, keep, weight * grow)
        sums = fma(sums, keep[:, None], mine * grow[:, None])
        best = above
    keep = np.ones(shape.heads, f32)
    if sinks is not None:
        sink = sinks.cpu().numpy()[heads]
        above = np.maximum(best, sink * f32(LOG2E))
        keep = np.exp2(best - above)
        total = fma(total, keep, np.exp2(fma(sink, f32(LOG2E), -above)))
    return torch.from_numpy(sums * (keep / total)[:, None])


def rows_of(starts: list[int], counts: list[int]) -> list[tuple[int, int]]:
    return [(number, start + at) for number, start in enumerate(starts) for at in range(counts[number])]


def float64(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, whose: list[tuple[int, int]]
) -> torch.Tensor:
    shown = None if sinks is None else sinks.cpu()
    return torch.stack([
        reference(row, at, case.flat_keys[number], case.flat_values[number], SCALE, shape.reach, shown)
        for row, (number, at) in zip(query.cpu(), whose, strict=True)
    ])  # fmt: skip


@pytest.mark.ci(after=4)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device fuses what numpy rounds")
@shapes
def test_every_kernel_has_the_bits_of_the_specification(device: torch.device, shape: Shape) -> None:
    starts, counts = [0, 29, 66], [1, 5, 3]
    whose = rows_of(starts, counts)
    case, sinks = exact_layer(shape, [start + count for start, count in zip(starts, counts, strict=True)], device)
    query = exact_query(shape, len(whose), device)
    want = torch.stack([
        spec(shape, case, sinks, query[row], number, position, GRAIN) for row, (number, position) in enumerate(whose)
    ])  # fmt: skip
    assert_close(want, float64(shape, case, sinks, query, whose), FP16)
    assert torch.equal(prefill(shape, case, sinks, query, starts, counts, grain=GRAIN), want)
    some = [4, 8]
    # by one program, joined by the last of them, and by a kernel of its own
    for splits in (1, 2, 6) if shape.sinks else (2,):
        out = decode(shape, case, sinks, query[some], [whose[row] for row in some], grain=GRAIN, splits=splits)
        assert torch.equal(out, want[some]), splits


def test_the_default_order_has_other_bits(device: torch.device) -> None:
    """Or the test above could not fail."""
    shape = SHAPES["full"]
    case, _ = exact_layer(shape, [100], device)
    query = exact_query(shape, 4, device)
    out = prefill(shape, case, None, query, [96], [4], grain=GRAIN)
    launch = Launch(32, 16, 4, 2)
    assert not torch.equal(out, prefill(shape, case, None, query, [96], [4], launch=launch, fixed=False))
    assert not torch.equal(out, prefill(shape, case, None, query, [96], [4], grain=Grain(16, 64)))
    assert not torch.equal(out, prefill(shape, case, None, query, [96], [4], grain=Grain(32, 32)))


@pytest.mark.parametrize("shape", [SHAPES["full"], SHAPES["window"]], ids=["full", "window"])
def test_chunks_tiles_and_neighbours_change_no_bit(device: torch.device, shape: Shape) -> None:
    case, sinks = exact_layer(shape, [90, 40], device)
    query = exact_query(shape, 90, device)
    whole = prefill(shape, case, sinks, query, [0], [90, 0], grain=GRAIN)
    for begin, end in ((31, 34), (40, 73)):
        chunk = torch.cat((query[begin:end], query[:3]))
        launch = Launch(32, 16, 4, 2)
        out = prefill(shape, case, sinks, chunk, [begin, 20], [end - begin, 3], grain=GRAIN, launch=launch)
        assert torch.equal(out[: end - begin], whole[begin:end]), (begin, end)


@pytest.mark.parametrize("splits", [1, 3])
def test_latents_of_decode_and_prefill(device: torch.device, splits: int) -> None:
    shape, lengths = SHAPES["latent"], [32, 33, 70]
    case, _ = exact_layer(shape, lengths, device)
    query = exact_query(shape, 4, device)
    want = prefill(shape, case, None, query[:3], [length - 1 for length in lengths], [1, 1, 1], grain=GRAIN)
    workspace = decode_workspace(4, shape.heads, 32, device)
    workspace.partials.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    lanes = torch.cat((case.lanes, case.lanes.new_tensor([-1])))
    for heads in (16, 64) if splits == 1 else (16,):
        out = torch.full((4, shape.heads, 32), torch.nan, device=device)
        attend_latents(
            query[..., :32], query[..., 32:], case.keys, case.tables, lanes,
            torch.tensor([*lengths, 1], device=device) - 1, scale=SCALE, out=out, workspace=workspace,
            launch=LatentLaunch(heads, 32, 4, 2, 1), splits=splits, fixed=True, grain=GRAIN,
        )  # fmt: skip
        assert torch.equal(out[:3], want)
        assert not out[3].any()


@pytest.mark.parametrize("shape", [SHAPES["chunk, sinks"], SHAPES["latent"]], ids=["chunk, sinks", "latent"])
def test_packed_sequences(device: torch.device, shape: Shape) -> None:
    lengths = [20, 0, 1, 65]
    case, sinks = exact_layer(shape, lengths, device)
    query = exact_query(shape, sum(lengths), device)
    want = prefill(shape, case, sinks, query, [0, 0, 0, 0], lengths, grain=GRAIN).to(shape.dtype)
    keys, values = (torch.cat(flat).to(device) for flat in (case.flat_keys, case.flat_values))
    out = attend_packed(
        query, keys, None if shape.latent else values,
        PackedLayout.cut(np.cumsum([0, *lengths]), sum(lengths), device), scale=SCALE,
        reach_kind=shape.reach[0], reach_size=shape.reach[1], sinks=sinks,
        value_dim=shape.value_dim if shape.latent else None, grain=GRAIN,
    )  # fmt: skip
    assert torch.equal(out, want)


def test_sequences_in_pages_and_among_rows_of_none(device: torch.device) -> None:
    """Rows that stand in pages already are read where they are, and rows of no sequence are zeros."""
    shape, lengths = SHAPES["chunk, sinks"], [32, 16]
    case, sinks = exact_layer(shape, lengths, device)
    query = exact_query(shape, 48, device)
    parts = [query, *(torch.cat(flat).to(device) for flat in (case.flat_keys, case.flat_values))]

    def attend(parts: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
        return attend_packed(
            *parts, layout, scale=SCALE, reach_kind=shape.reach[0], reach_size=shape.reach[1], sinks=sinks, grain=GRAIN
        )

    whole = PackedLayout.cut([0, 32, 48], 48, device)
    assert whole.paged(parts[1]).data_ptr() == parts[1].data_ptr()
    want = attend(parts, whole)
    assert torch.equal(want, prefill(shape, case, sinks, query, [0, 0], lengths, grain=GRAIN).to(shape.dtype))
    at = torch.tensor([*range(1, 33), *range(35, 51)], device=device)
    apart = [part.new_full((53, *part.shape[1:]), torch.nan).index_copy_(0, at, part) for part in parts]
    found = attend(apart, PackedLayout(np.array([1, 35]), np.array(lengths), 53, device))
    assert torch.equal(found[at], want)
    assert not found[[0, 33, 34, 51, 52]].any()


def test_packed_refuses_rows_that_do_not_fit(device: torch.device) -> None:
    tensor = torch.zeros(5, 2, 16, device=device)
    for offsets in ([], [0], [0, 4], [1, 5], [0, 6, 5]):
        with pytest.raises(BadInput, match="cut"):
            PackedLayout.cut(offsets, 5, device)
    for firsts, counts in (([4], [2]), ([-1], [2]), ([0], [-1]), ([0, 2], [4, 3])):
        with pytest.raises(BadInput, match="within 5 rows"):
            PackedLayout(np.array(firsts), np.array(counts), 5, device)
    whole = PackedLayout.cut([0, 5], 5, device)
    with pytest.raises(BadInput, match="value_dim"):
        attend_packed(tensor, tensor, None, whole, scale=1.0)
    with pytest.raises(BadInput, match="5 rows beside 4 queries"):
        attend_packed(tensor[:4], tensor, tensor, whole, scale=1.0)
    nothing = tensor[:0]
    assert len(attend_packed(nothing, nothing, nothing, PackedLayout.cut([0, 0], 0, device), scale=1.0)) == 0


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lengths(device: torch.device, data: st.DataObject) -> None:
    """What no query may see is NaN: behind its last key, and before its first."""
    kind = data.draw(st.sampled_from(["full", "window", "chunk", "from"]))
    size = data.draw(st.integers(1, 70))
    shape = Shape(heads=3, reach=(kind, size), sinks=data.draw(st.booleans()), dtype=FP16)
    start, count = data.draw(st.integers(0, 100)), data.draw(st.integers(1, 12))
    case, sinks = exact_layer(shape, [start + count + 5], device)
    first = first_seen(kind, size, start)
    slots = case.slots[0]
    for gone in (slots[:first], slots[start + count :]):
        assert case.values is not None
        case.keys[gone // 4, gone % 4] = case.values[gone // 4, gone % 4] = torch.nan
    case.tables[:, : first // 4] = 1 << 28
    query = exact_query(shape, count, device)
    whose = rows_of([start], [count])
    out = prefill(shape, case, sinks, query, [start], [count], grain=GRAIN)
    assert_close(out, float64(shape, case, sinks, query, whose), FP16)
    # of one query alone, what the others see is gone too
    row = data.draw(st.integers(0, count - 1))
    mine = first_seen(kind, size, start + row)
    for gone in (slots[:mine], slots[start + row + 1 :]):
        case.keys[gone // 4, gone % 4] = case.values[gone // 4, gone % 4] = torch.nan
    splits = data.draw(st.integers(1, 5))
    alone = decode(shape, case, sinks, query[row : row + 1], [(0, start + row)], grain=GRAIN, splits=splits)
    assert torch.equal(alone[0], out[row])


def test_grains_and_parts() -> None:
    for dim in (16, 64, 80, 128, 192, 256, 576):
        for dtype in (torch.float32, FP16, torch.bfloat16):
            grain = grain_of(dim, dtype)
            assert grain.part % grain.keys == 0
            assert grain.keys == decode_launch(8, dim, dtype).keys == prefill_launch(dim, dtype).keys
    grain = Grain(16, 32)
    assert most_parts(1000, None, grain) == 32
    assert most_parts(1000, 1, grain) == 1
    for kind in ("window", "chunk"):
        for size in range(1, 140):
            first = [max(0, at - size + 1) if kind == "window" else at // size * size for at in range(1000)]
            used = max(at // 32 - low // 32 + 1 for at, low in enumerate(first))
            assert used <= most_parts(1000, size, grain) <= used + 1


def test_a_workspace_without_room_for_all_parts_means_no_splits(device: torch.device) -> None:
    shape = SHAPES["full"]
    case, _ = exact_layer(shape, [150], device)
    query = exact_query(shape, 1, device)
    out = torch.empty(1, 2, 16, device=device)
    workspace = decode_workspace(1, 2, 16, device)
    small = type(workspace)(workspace.partials[:4], workspace.stats[:, :4], workspace.arrivals[:4], 132)
    common: dict[str, Any] = {
        "scale": SCALE, "reach_kind": "full", "reach_size": 0, "sinks": None, "out": out, "workspace": small,
        "fixed": True, "grain": GRAIN,
    }  # fmt: skip
    at = (case.keys, case.values, case.tables, case.lanes, torch.tensor([149], device=device))
    attend_decode(query, *at, **common)
    assert torch.equal(out, decode(shape, case, None, query, [(0, 149)], grain=GRAIN, splits=5))
    with pytest.raises(BadInput, match="room"):
        attend_decode(query, *at, splits=2, **common)


def test_a_rank_that_products_do_not_divide_is_refused(device: torch.device) -> None:
    shape = Shape(heads=2, key_dim=32, value_dim=24, latent=True)
    case, _ = exact_layer(shape, [3], device)
    query, out = torch.zeros(1, 2, 32, device=device), torch.zeros(1, 2, 24, device=device)
    with pytest.raises(BadInput, match="16"):
        attend_latents(
            query[..., :24], query[..., 24:], case.keys, case.tables, case.lanes, torch.tensor([2], device=device),
            scale=SCALE, out=out, workspace=decode_workspace(1, 2, 24, device), fixed=True,
        )  # fmt: skip
