"""Paged attention against float64: decode with and without splits, prefill, and how KV gets into the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_layers import SHAPES, Reaches, Shape, decode, dense, expected, make_layer, make_query, prefill
from attention_reference import assert_close
from fdasync_kernels.attention.decode import attend_decode, count_splits, decode_launch, decode_workspace
from fdasync_kernels.attention.prefill import PREFILL_TILE, attend_prefill, prefill_launch, prefill_tiles
from fdasync_kernels.attention.tile import Launch, split_dims
from fdasync_kernels.store import store_kv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.ci(after=9)
@shapes
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(device: torch.device, shape: Shape, splits: int) -> None:
    lengths = [1, 5, 17, 50]
    case, sinks = make_layer(shape, lengths, device)
    query = make_query(shape, len(lengths), device)
    positions = torch.tensor([length - 1 for length in lengths], device=device)
    launch = replace(decode_launch(shape.heads // shape.kv_heads, shape.key_dim, shape.dtype), keys=16)
    out = decode(shape, case, sinks, query, case.lanes, positions, splits=splits, launch=launch)
    whose = [(number, length - 1) for number, length in enumerate(lengths)]
    assert_close(out, expected(shape, case, sinks, query, whose), shape.dtype)


def test_decode_joins_many_splits(device: torch.device) -> None:
    shape = Shape(heads=2, sinks=True)
    case, sinks = make_layer(shape, [305, 40], device)
    # what the first splits saw must shrink when later ones see more
    case.flat_keys[0] *= torch.linspace(0.1, 3, 305)[:, None, None]
    case.keys[case.slots[0] // 4, case.slots[0] % 4] = case.flat_keys[0].to(device)
    query = make_query(shape, 2, device)
    positions = torch.tensor([304, 39], device=device)
    out = decode(shape, case, sinks, query, case.lanes, positions, splits=20, launch=Launch(16, 16, 4, 2))
    assert_close(out, expected(shape, case, sinks, query, [(0, 304), (1, 39)]), shape.dtype)


def test_decode_sees_nothing_after_its_position(device: torch.device) -> None:
    shape = Shape()
    case, _ = make_layer(shape, [40], device)
    case.keys[case.slots[0][30:] // 4, case.slots[0][30:] % 4] = torch.inf
    query = make_query(shape, 1, device)
    for splits in (1, 2):
        out = decode(shape, case, None, query, case.lanes, torch.tensor([29], device=device), splits=splits)
        assert_close(out, expected(shape, case, None, query, [(0, 29)]), shape.dtype)


@pytest.mark.parametrize("reach", [("window", 6), ("chunk", 16), ("from", 15)])
def test_what_a_window_left_behind_is_not_read(device: torch.device, reach: Reaches) -> None:
    shape = Shape(reach=reach)
    case, _ = make_layer(shape, [21], device)
    gone = case.slots[0][:15]
    for view in (case.keys, case.values):
        assert view is not None
        view[gone // 4, gone % 4] = torch.nan
    query = make_query(shape, 1, device)
    want = expected(shape, case, None, query, [(0, 20)])
    assert_close(decode(shape, case, None, query, case.lanes, torch.tensor([20], device=device)), want, shape.dtype)
    assert_close(prefill(shape, case, None, query, [20], [1]), want, shape.dtype)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_rows_become_zeros(device: torch.device, splits: int) -> None:
    shape = Shape(heads=4, kv_heads=2)
    case, _ = make_layer(shape, [9, 33], device)
    query = make_query(shape, 5, device)
    query[2:] = torch.nan
    lanes = torch.tensor([*case.lanes.tolist(), -1, int(case.lanes[0]), -1], dtype=torch.int32, device=device)
    positions = torch.tensor([8, 32, 3, -1, -1], device=device)
    out = decode(shape, case, None, query, lanes, positions, splits=splits)
    assert_close(out[:2], expected(shape, case, None, query[:2], [(0, 8), (1, 32)]), shape.dtype)
    assert not out[2:].any()


@pytest.mark.ci(after=6)
@shapes
def test_prefill(device: torch.device, shape: Shape) -> None:
    """Ragged, after cached prefixes, one token, a whole prompt; between them rows of no sequence."""
    starts, counts = [0, 37, 30, 17], [19, 1, 5, 12]
    case, sinks = make_layer(shape, [start + count for start, count in zip(starts, counts, strict=True)], device)
    query = make_query(shape, sum(counts) + 4, device)
    # of several keys' tiles the first may hold nothing that a tile's last query sees
    launch = replace(prefill_launch(shape.key_dim, shape.dtype), rows=64, keys=16)
    out = prefill(shape, case, sinks, query, starts, counts, gap=1, launch=launch)
    mine, whose, row = [], [], 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert out[row].isnan().all(), "rows of no sequence are not written"
        mine.extend(range(row + 1, row + 1 + count))
        whose.extend((number, start + offset) for offset in range(count))
        row += 1 + count
    assert_close(out[mine], expected(shape, case, sinks, query[mine], whose), shape.dtype)


def test_prefill_of_several_tiles(device: torch.device) -> None:
    shape, count = Shape(heads=3), PREFILL_TILE + 9
    case, _ = make_layer(shape, [count + 6], device, block_tokens=16)
    query = make_query(shape, count, device)
    # rows of a tile end in the middle of a query's heads
    out = prefill(shape, case, None, query, [6], [count], launch=Launch(64, 64, 4, 2))
    assert_close(out, expected(shape, case, None, query, [(0, 6 + at) for at in range(count)]), shape.dtype)


@pytest.mark.parametrize("name", ["four heads a group", "window and sinks", "latent", "bf16"])
def test_decode_is_prefill_of_one_token(device: torch.device, name: str) -> None:
    shape = SHAPES[name]
    case, sinks = make_layer(shape, [3, 26], device)
    query = make_query(shape, 2, device)
    decoded = decode(shape, case, sinks, query, case.lanes, torch.tensor([2, 25], device=device))
    prefilled = prefill(shape, case, sinks, query, [2, 25], [1, 1])
    assert_close(decoded, prefilled.cpu().double(), shape.dtype)


@pytest.mark.ci
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lengths(device: torch.device, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["full", "window", "chunk", "from"]))
    shape = Shape(heads=3, reach=(kind, data.draw(st.integers(1, 40))), sinks=True)
    starts = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    counts = [data.draw(st.integers(1, 20)) for _ in starts]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    case, sinks = make_layer(shape, lengths, device, seed=data.draw(st.integers(0, 99)))
    query = make_query(shape, sum(counts), device)
    whose = [(number, start + at) for number, start in enumerate(starts) for at in range(counts[number])]
    want = expected(shape, case, sinks, query, whose)
    assert_close(prefill(shape, case, sinks, query, starts, counts), want, shape.dtype)
    last = np.cumsum(counts) - 1
    positions = torch.tensor([length - 1 for length in lengths], device=device)
    launch = Launch(16, 16, 4, 2)
    splits = data.draw(st.integers(1, 5))
    out = decode(shape, case, sinks, query[last], case.lanes, positions, splits=splits, launch=launch)
    assert_close(out, want[last], shape.dtype)


@pytest.mark.parametrize(("shares", "each"), [(1, 2), (4, 1), (2, 2)])
def test_store_writes_its_slots_and_nothing_else(device: torch.device, shares: int, each: int) -> None:
    heads, key_dim, value_dim = shares * each, 24, 16
    share = 4 * each * (key_dim + value_dim)
    pool = torch.full((5, shares * share), torch.nan, device=device)
    keys, values = (
        pool.as_strided((5, 4, shares, each, dim), (shares * share, each * dim, share, dim, 1), offset)
        for dim, offset in ((key_dim, 0), (value_dim, 4 * each * key_dim))
    )
    key = torch.randn(heads, 6, key_dim, device=device).transpose(0, 1)
    value = torch.randn(6, heads, 2 * value_dim, device=device)[..., :value_dim]
    slots = torch.tensor([7, 3, -1, 19, 0, -1], device=device)
    store_kv(key, value, keys, values, slots)
    want_keys, want_values = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want_keys[slot // 4, slot % 4] = key[row].view(shares, each, key_dim)
            want_values[slot // 4, slot % 4] = value[row].view(shares, each, value_dim)
    assert torch.equal(keys.nan_to_num(9), want_keys.nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), want_values.nan_to_num(9))
    with pytest.raises(BadInput, match="does not fit"):
        store_kv(key[:, 1:], value[:, 1:], keys, values, slots)


def test_store_of_latents_and_of_nothing(device: torch.device) -> None:
    pool = torch.full((3, 4, 1, 24), torch.nan, dtype=torch.bfloat16, device=device)
    latents = torch.randn(3, 1, 24, device=device).bfloat16()
    store_kv(latents, None, pool, None, torch.tensor([5, -1, 8], device=device))
    assert torch.equal(pool.flatten(0, 1)[[5, 8]], latents[[0, 2]])
    assert int(pool.isfinite().sum()) == 48
    store_kv(latents[:0], None, pool, None, torch.zeros(0, dtype=torch.int64, device=device))
    assert int(pool.isfinite().sum()) == 48


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 3 * PREFILL_TILE), max_size=8))
def test_tiles_cover_every_query_once(counts: list[int]) -> None:
    tiles = prefill_tiles(counts)
    assert tiles.dtype == np.int32
    assert tiles.shape == (sum(-(-count // PREFILL_TILE) for count in counts), 2)
    assert sorted(map(tuple, tiles.tolist())) == [
        (number, tile) for number, count in enumerate(counts) for tile in range(-(-count // PREFILL_TILE))
    ]
    assert (np.diff(tiles[:, 1]) <= 0).all(), "the longest first"


def test_dimensions_are_covered_with_little_waste() -> None:
    named = {dim: split_dims(dim) for dim in (8, 64, 80, 96, 128, 192, 576)}
    assert named == {
        8: (16, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 192: (128, 64), 576: (512, 64),
    }  # fmt: skip
    for dim in range(1, 577):
        first, rest = split_dims(dim)
        assert first + rest >= dim, "every dimension is read"
        assert {first.bit_count(), rest.bit_count()} <= {0, 1}
        assert first >= 16
        assert not 0 < rest < 16


def test_splits_follow_what_the_host_knows() -> None:
    launch = Launch(16, 64, 4, 3)

    def ask(sequences: int, max_context: int = 1 << 15, capacity: int = 32 * 256) -> int:
        return count_splits(sequences, 32, 4, max_context, launch, capacity, 132)

    assert ask(1) == 64
    assert ask(1, max_context=200) == 4
    assert ask(1, capacity=320) == 10
    assert ask(64) == 2
    assert ask(256) == ask(1000) == ask(1, capacity=0) == 1


def test_a_workspace_that_is_too_narrow_means_no_splits(device: torch.device) -> None:
    shape = Shape()
    case, _ = make_layer(shape, [40], device)
    query, out = make_query(shape, 1, device), torch.empty(1, 2, 16, device=device)
    common: dict[str, Any] = {"scale": 0.3, "reach_kind": "full", "reach_size": 0, "sinks": None, "out": out}
    narrow = decode_workspace(1, 2, 8, device)
    at = (case.lanes, torch.tensor([39], device=device))
    attend_decode(query, case.keys, case.values, case.tables, *at, workspace=narrow, **common)
    assert_close(out, expected(shape, case, None, query, [(0, 39)]), shape.dtype)
    with pytest.raises(BadInput, match="room"):
        attend_decode(query, case.keys, case.values, case.tables, *at, workspace=narrow, splits=2, **common)
    with pytest.raises(BadInput, match="value_dim"):
        attend_decode(query, case.keys, None, case.tables, *at, workspace=narrow, **common)
    with pytest.raises(BadInput, match="fit"):
        attend_decode(query[..., :8], case.keys, case.values, case.tables, *at, workspace=narrow, **common)
    with pytest.raises(BadInput, match="float16"):
        attend_decode(query.half(), case.keys, case.values, case.tables, *at, workspace=narrow, **common)
    with pytest.raises(BadInput, match="contiguous"):
        attend_decode(query[..., ::2], case.keys, case.values, case.tables, *at, workspace=narrow, **common)
    with pytest.raises(BadInput, match="contiguous"):
        store_kv(query[..., ::2], None, case.keys, None, at[1])
    with pytest.raises(BadInput, match="contiguous"):
        store_kv(query, query[..., ::2], case.keys, case.values, at[1])
    attend_decode(query[:0], case.keys, case.values, case.tables, *at, workspace=narrow, **common)
    assert len(prefill(shape, case, None, query[:0], [], [])) == 0


# -- what only a GPU can show -------------------------------------------------------------------


LARGE = {
    "Qwen3": Shape(heads=32, kv_heads=4, key_dim=128, value_dim=128, dtype=torch.bfloat16),
    "gpt-oss": Shape(
        heads=64, kv_heads=8, key_dim=64, value_dim=64, reach=("window", 128), sinks=True, dtype=torch.bfloat16
    ),
    "DeepSeek": Shape(heads=128, key_dim=576, value_dim=512, latent=True, dtype=torch.bfloat16),
    "192 and 128": Shape(heads=10, kv_heads=2, key_dim=192, value_dim=128, reach=("chunk", 512), dtype=torch.float16),
    "one head a group": Shape(heads=8, kv_heads=8, key_dim=80, value_dim=80, dtype=torch.bfloat16),
    "float32": Shape(heads=8, kv_heads=2, key_dim=128, value_dim=128),
    "float32, latent": Shape(heads=16, key_dim=576, value_dim=512, latent=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_large(device: torch.device, shape: Shape) -> None:
    """The tiles that are really used, at lengths where every loop turns often."""
    starts, counts = [0, 1500, 700, 1023, 0], [300, 129, 1, 200, 17]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    case, sinks = make_layer(shape, lengths, device, block_tokens=16)
    query = make_query(shape, sum(counts), device) / shape.key_dim**0.25
    out = prefill(shape, case, sinks, query, starts, counts)
    row = 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        want = dense(shape, case, sinks, query[row : row + count], number, start)
        assert_close(out[row : row + count], want, shape.dtype)
        row += count
    positions = torch.tensor(lengths, device=device) - 1
    for splits in (None, 1, 7):
        out = decode(shape, case, sinks, query[:5], case.lanes, positions, splits=splits)
        for number, length in enumerate(lengths):
            want = dense(shape, case, sinks, query[number : number + 1], number, length - 1)
            assert_close(out[number : number + 1], want, shape.dtype)


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_tables(device: torch.device) -> None:
    shape = SHAPES["four heads a group"]
    case, _ = make_layer(shape, [300, 70, 41], device, block_tokens=16)
    query, out = make_query(shape, 3, device), torch.empty(3, 8, 32, device=device)
    workspace = decode_workspace(3, 8, 32, device)
    lanes, positions = case.lanes.clone(), torch.tensor([2, 2, 2], device=device)
    key, value = torch.randn(3, 2, 32, device=device), torch.randn(3, 2, 32, device=device)
    slots = torch.full((3,), -1, device=device)

    def step() -> None:
        store_kv(key, value, case.keys, case.values, slots)
        attend_decode(
            query, case.keys, case.values, case.tables, lanes, positions, scale=0.3, reach_kind="full", reach_size=0,
            sinks=None, out=out, workspace=workspace, splits=4,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lanes.copy_(case.lanes[[1, 0, 2]])
    positions.copy_(torch.tensor([69, 299, -1]))
    slots.copy_(torch.stack((case.slots[1][69], case.slots[0][299], slots[2])))
    graph.replay()
    case.flat_keys[1][69], case.flat_values[1][69] = key[0].cpu(), value[0].cpu()
    case.flat_keys[0][299], case.flat_values[0][299] = key[1].cpu(), value[1].cpu()
    assert_close(out[:2], expected(shape, case, None, query[:2], [(1, 69), (0, 299)]), shape.dtype)
    assert not out[2].any()


@pytest.mark.gpu
def test_steps_of_other_sizes_compile_nothing(device: torch.device) -> None:
    from fdasync_kernels import store
    from fdasync_kernels.attention import decode as attention
    from fdasync_kernels.attention import join, prefill

    shape = SHAPES["four heads a group"]
    case, _ = make_layer(shape, [60, 61, 62, 63, 64], device, block_tokens=16)
    kernels = (attention._decode, join.join_splits, prefill._prefill, store._store)

    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    def step(count: int, offset: int) -> None:
        query = make_query(shape, 5, device)[:count]
        lanes = case.lanes[offset : offset + count]
        positions = torch.arange(60 - offset, 60 - offset + count, device=device)
        workspace, out = decode_workspace(5, 8, 32, device), torch.empty(5, 8, 32, device=device)
        reach: dict[str, Any] = {"reach_kind": "window", "reach_size": 7 + count, "sinks": None, "scale": 1.0 / count}
        attend_decode(
            query, case.keys, case.values, case.tables, lanes, positions, out=out[:count], workspace=workspace,
            splits=1 + count, **reach,
        )  # fmt: skip
        one = torch.ones(8, dtype=torch.int64, device=device)[offset : offset + count]
        tiles = torch.zeros(2 * count + 1, dtype=torch.int32, device=device)[1:].view(count, 2)
        tiles[:, 0] = torch.arange(count)
        attend_prefill(
            query, case.keys, case.values, case.tables, lanes, positions, positions - positions[0], one, tiles,
            out=out, **reach,
        )  # fmt: skip
        slots = torch.full((8,), -1, device=device)[offset : offset + count]
        store_kv(query[:, :2], query[:, 2:4], case.keys, case.values, slots)

    step(4, 0)  # many splits, joined by a kernel of its own
    step(1, 0)  # few, joined by the program that ends last
    before = compiled()
    assert before >= 5
    for count, offset in ((1, 1), (3, 1), (2, 3), (4, 1)):
        step(count, offset)
    assert compiled() == before
