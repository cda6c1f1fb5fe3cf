"""Prefill on Hopper: which heads and pools its kernel takes; on a GPU, that it is right and gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_layers import Shape, dense, make_layer, make_query, prefill
from attention_reference import Case, assert_close
from fdasync_kernels.attention import prefill_hopper
from fdasync_kernels.attention.hopper_pages import page_descriptor, page_rows
from fdasync_kernels.attention.prefill import attend_prefill, prefill_launch, prefill_tiles
from fdasync_kernels.attention.prefill_hopper import fits_hopper

BF16, FP16 = torch.bfloat16, torch.float16
QWEN = Shape(heads=32, kv_heads=4, key_dim=128, value_dim=128, dtype=BF16)
SHAPES = {
    "Qwen3": QWEN,
    "gpt-oss": Shape(heads=64, kv_heads=8, key_dim=64, value_dim=64, reach=("window", 128), sinks=True, dtype=BF16),
    "chunk, five a group": Shape(heads=10, kv_heads=2, key_dim=128, value_dim=128, reach=("chunk", 500), dtype=FP16),
    "from": QWEN._replace(reach=("from", 2)),
    "one a group, sinks": Shape(heads=4, kv_heads=4, key_dim=64, value_dim=64, sinks=True, dtype=FP16),
    "two heads a share": QWEN._replace(heads=16, kv_heads=8, shares=4),
    "all heads in one share": QWEN._replace(shares=1),
    "twenty a group": Shape(heads=20, kv_heads=1, key_dim=128, value_dim=128, reach=("window", 33), dtype=BF16),
}


def views(blocks: int, block_tokens: int, heads: int, dim: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Keys and values of the second of two layers, one head a share."""
    return [view.squeeze(3) for view in shared(blocks, block_tokens, heads, 1, dim, dtype)]


def shared(
    blocks: int, block_tokens: int, shares: int, heads: int, dim: int, dtype: torch.dtype = BF16
) -> list[torch.Tensor]:
    """As `views`, of shares with several heads."""
    width = block_tokens * heads * dim
    pool = torch.zeros(blocks, shares * 4 * width, dtype=dtype)
    shape, strides = (blocks, block_tokens, shares, heads, dim), (shares * 4 * width, heads * dim, 4 * width, dim, 1)
    return [pool.as_strided(shape, strides, place * width) for place in (2, 3)]


def test_which_heads_and_pools_fit() -> None:
    query = torch.zeros(3, 8, 128, dtype=BF16)
    keys, values = views(3, 16, 2, 128)
    assert fits_hopper(query, keys, values)
    assert fits_hopper(query.half(), *views(3, 8, 2, 128, FP16))
    assert fits_hopper(query[..., :64], *views(3, 64, 4, 64))
    assert not fits_hopper(query, keys, None), "latent keys"
    assert not fits_hopper(query.float(), *views(3, 16, 2, 128, torch.float32))
    assert not fits_hopper(query[..., :96], *views(3, 16, 2, 96)), "a width that has no tile"
    assert not fits_hopper(query, keys, values[..., :64]), "values of another width"
    assert not fits_hopper(query, *views(3, 4, 2, 128)), "pages smaller than what the copy engine writes as one"
    assert fits_hopper(query, *shared(3, 16, 2, 2, 128))
    assert fits_hopper(query, *(view[:, :, :, 2:] for view in shared(3, 16, 1, 4, 128))), "heads of one of two ranks"
    assert not fits_hopper(query, *(view[:, :, 0, ::2] for view in shared(3, 16, 1, 4, 128))), "heads apart"
    assert not fits_hopper(query, keys, shared(3, 16, 1, 2, 128)[1]), "keys in shares, values side by side"
    odd = torch.zeros(3, 2 * 16 * 256 + 8, dtype=BF16)
    apart = odd.as_strided((3, 16, 2, 128), (odd.stride(0), 256, 128, 1))
    assert not fits_hopper(query, apart, apart), "blocks that do not stand on the grid of tokens"
    shifted = torch.zeros(3 * 16 * 256 + 4, dtype=BF16)[4:].view(3, 16, 2, 128)
    assert not fits_hopper(query, shifted, shifted), "an address that the copy engine cannot take"


@pytest.mark.parametrize(("shares", "heads"), [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_the_copy_engine_is_sent_to_every_head(shares: int, heads: int) -> None:
    """Elements at the rows and columns that the kernel asks for, by the descriptor's strides, are the view's."""
    keys = shared(3, 16, shares, heads, 128)[0]
    pool = torch.arange(keys.untyped_storage().nbytes() // 2, dtype=torch.int32)
    numbers = pool.as_strided(keys.shape, keys.stride(), keys.storage_offset())
    rows = page_rows(keys)
    assert rows is not None
    descriptor = page_descriptor(keys, rows)
    grid = pool.as_strided(tuple(descriptor.shape), tuple(descriptor.strides), keys.storage_offset())
    for block in range(3):
        for head in range(shares * heads):
            row = block * rows.block + head // rows.per_share * rows.share
            column = head % rows.per_share * 128
            page = grid[row : row + 16, column : column + 128]
            assert torch.equal(page, numbers[block, :, head // heads, head % heads])
    last = (descriptor.shape[0] - 1) * descriptor.strides[0] + descriptor.shape[1]
    assert keys.storage_offset() + last <= len(pool), "the copy engine may be sent past the pool"


# -- what only a GPU can show -------------------------------------------------------------------


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a GPU of capability 9.0")
    return device


def ragged(
    shape: Shape, case: Case, sinks: torch.Tensor | None, query: torch.Tensor, starts: list[int], counts: list[int]
) -> None:
    assert fits_hopper(query, case.keys, case.values)
    out, row = prefill(shape, case, sinks, query, starts, counts, gap=1), 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert out[row].isnan().all(), "rows of no sequence are not written"
        mine = slice(row + 1, row + 1 + count)
        assert_close(out[mine], dense(shape, case, sinks, query[mine], number, start), shape.dtype)
        row += 1 + count


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("block_tokens", [8, 16, 64])
def test_ragged(hopper: torch.device, shape: Shape, block_tokens: int) -> None:
    starts, counts = [0, 1500, 700, 1023, 0, 127, 128], [300, 129, 1, 200, 17, 1, 1]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    case, sinks = make_layer(shape, lengths, hopper, block_tokens=block_tokens)
    query = make_query(shape, sum(counts) + len(counts), hopper) / shape.key_dim**0.25
    ragged(shape, case, sinks, query, starts, counts)


@pytest.mark.gpu
def test_many_more_programs_than_processors(hopper: torch.device) -> None:
    draw = np.random.default_rng(3)
    starts, counts = draw.integers(0, 600, 90).tolist(), draw.integers(1, 300, 90).tolist()
    shape = QWEN._replace(heads=16, kv_heads=2)
    case, sinks = make_layer(shape, [start + count for start, count in zip(starts, counts, strict=True)], hopper,
                             block_tokens=16)  # fmt: skip
    query = make_query(shape, sum(counts) + len(counts), hopper) / shape.key_dim**0.25
    ragged(shape, case, sinks, query, starts, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [("window", 40), ("chunk", 50), ("from", 2)])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_page_with_the_first_key_and_the_last(hopper: torch.device, reach: tuple[Any, int], dim: int) -> None:
    """Both ends of it are made zeros, by two groups of warps that must not undo each other's."""
    shape = QWEN._replace(heads=8, kv_heads=2, key_dim=dim, value_dim=dim, reach=reach)
    starts, counts = [number % 23 for number in range(200)], [17 + number % 13 for number in range(200)]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    case, sinks = make_layer(shape, lengths, hopper, block_tokens=64)
    query = make_query(shape, sum(counts) + len(counts), hopper) / shape.key_dim**0.25
    for _ in range(5):
        ragged(shape, case, sinks, query, starts, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [("window", 100), ("chunk", 512), ("from", 1)])
def test_what_a_window_left_behind_is_not_read(hopper: torch.device, reach: tuple[Any, int]) -> None:
    shape, position = QWEN._replace(reach=reach), 1034
    case, _ = make_layer(shape, [position + 1], hopper, block_tokens=16)
    first = {"window": position - 99, "chunk": 1024, "from": 1}[reach[0]]
    gone = case.slots[0][:first]
    for view in (case.keys, case.values):
        assert view is not None
        view[gone // 16, gone % 16] = torch.nan
    query = make_query(shape, 1, hopper) / shape.key_dim**0.25
    want = dense(shape, case, None, query, 0, position)
    case.tables[:, : first // 16] = 1 << 28
    assert_close(prefill(shape, case, None, query, [position], [1]), want, shape.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES.values(), QWEN._replace(key_dim=96, value_dim=96)],
                         ids=[*SHAPES.keys(), "not for Hopper's kernel"])  # fmt: skip
def test_the_same_bits_alone_in_a_chunk_and_in_the_whole(hopper: torch.device, shape: Shape) -> None:
    length = 3000
    case, sinks = make_layer(shape, [length], hopper, block_tokens=16)
    query = make_query(shape, length, hopper) / shape.key_dim**0.25
    whole = prefill(shape, case, sinks, query, [0], [length])
    assert whole.isfinite().all()
    for begin, count in ((1000, 300), (1, 129), (2871, 129), *((at, 1) for at in (0, 1, 63, 64, 700, 1023, 2999))):
        part = prefill(shape, case, sinks, query[begin : begin + count], [begin], [count])
        assert torch.equal(part, whole[begin : begin + count]), (begin, count)


@pytest.mark.gpu
def test_tiles_of_other_heights_give_the_same_bits(hopper: torch.device) -> None:
    shape, length = QWEN, 700
    case, _ = make_layer(shape, [length], hopper, block_tokens=16)
    query = make_query(shape, length, hopper) / shape.key_dim**0.25
    launch = prefill_launch(128, BF16)
    wide = prefill(shape, case, None, query, [0], [length], launch=launch)
    low = type(launch)(64, launch.keys, 4, 2)
    assert torch.equal(wide, prefill(shape, case, None, query, [0], [length], launch=low))


@pytest.mark.gpu
def test_a_graph_with_padding_follows_lengths_and_tables(hopper: torch.device) -> None:
    """As a graph of steps with prompts: padding sequences, padding tiles, rows of no sequence; nothing is compiled."""
    shape, places, most = QWEN._replace(heads=16, kv_heads=2), 40, 700
    case, _ = make_layer(shape, [600, 300, 41], hopper, block_tokens=16)
    query = make_query(shape, most, hopper) / shape.key_dim**0.25
    out = torch.full((most, 16, 128), torch.nan, dtype=BF16, device=hopper)
    lanes = torch.full((places,), -1, dtype=torch.int32, device=hopper)
    starts = torch.zeros(places, dtype=torch.int64, device=hopper)
    first_rows, counts = (torch.zeros(places, dtype=torch.int32, device=hopper) for _ in range(2))
    tiles = torch.zeros(places + most // 128, 2, dtype=torch.int32, device=hopper)

    def fill(start: list[int], count: list[int]) -> None:
        number = len(start)
        lanes.fill_(-1)
        counts.zero_()
        tiles[:, 0], tiles[:, 1] = places - 1, 0
        lanes[:number] = case.lanes[:number]
        starts[:number] = torch.tensor(start)
        counts[:number] = torch.tensor(count)
        first_rows[:number] = torch.from_numpy(np.cumsum([0, *count])[:-1])
        mine = torch.from_numpy(prefill_tiles(count))
        tiles[: len(mine)] = mine.to(hopper)
        out.fill_(torch.nan)

    def step() -> None:
        attend_prefill(
            query, case.keys, case.values, case.tables, lanes, starts, first_rows, counts, tiles, scale=0.3,
            reach_kind="full", reach_size=0, sinks=None, out=out,
        )  # fmt: skip

    fill([0], [5])
    step()
    torch.cuda.synchronize()
    compiled = len(prefill_hopper._prefill_hopper.device_caches[torch.cuda.current_device()][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for start, count in (([0, 299, 40], [600, 1, 1]), ([590, 0, 1], [10, 300, 40]), ([599], [1]), ([], [])):
        fill(start, count)
        graph.replay()
        row = 0
        for number, (begin, length) in enumerate(zip(start, count, strict=True)):
            want = dense(shape, case, None, query[row : row + length], number, begin)
            assert_close(out[row : row + length], want, BF16)
            row += length
        assert out[row:].isnan().all()
    assert len(prefill_hopper._prefill_hopper.device_caches[torch.cuda.current_device()][0]) == compiled
