"""Decode over paged latents against float64: tiles, splits, ragged lengths, padding, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_reference import Case, assert_close
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.latent import LatentLaunch, attend_latents, latent_launch, latent_splits
from fdasync_kernels.attention.latent_hopper import LAUNCH, fits_hopper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from latent_layers import SCALE, Shape, decode, expected, last, make_latents, make_query

from fdasync.errors import BadInput

SHAPES = {
    "few heads": Shape(),
    "heads of two tiles": Shape(heads=20, rank=32),
    "a rank and a rotary part that fill no tile": Shape(heads=3, rank=24, dims=12),
    "bf16": Shape(heads=6, rank=32, dims=16, dtype=torch.bfloat16),
    "fp16": Shape(heads=5, rank=16, dims=16, dtype=torch.float16),
    "as published": Shape(heads=16, rank=512, dims=64, dtype=torch.bfloat16),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
SMALL = LatentLaunch(16, 16, 4, 2, 2)
MANY_HEADS = LatentLaunch(64, 32, 8, 3, 1)


@pytest.mark.ci(after=4)
@shapes
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_decode(device: torch.device, shape: Shape, splits: int | None) -> None:
    lengths = [1, 5, 17, 50]
    case = make_latents(shape, lengths, device)
    query = make_query(shape, len(lengths), device)
    launch = SMALL if splits else None
    out = decode(shape, case, query, case.lanes, last(lengths, device), splits=splits, launch=launch)
    assert_close(out, expected(case, query, [(number, n - 1) for number, n in enumerate(lengths)]), shape.dtype)


@pytest.mark.parametrize("splits", [1, 2])
def test_tile_of_many_heads(device: torch.device, splits: int) -> None:
    """Its products are apart, which the other tiles' are not."""
    shape, lengths = Shape(heads=70, dtype=torch.bfloat16), [150, 64, 3]
    case = make_latents(shape, lengths, device, block_tokens=16)
    query = make_query(shape, 3, device)
    assert latent_launch(128, torch.bfloat16) == MANY_HEADS
    out = decode(shape, case, query, case.lanes, last(lengths, device), splits=splits, launch=MANY_HEADS)
    assert_close(out, expected(case, query, [(0, 149), (1, 63), (2, 2)]), shape.dtype)


def test_many_splits_are_joined(device: torch.device) -> None:
    shape = Shape(heads=2)
    case = make_latents(shape, [305, 40], device)
    # what the first splits saw must shrink when later ones see more
    case.flat_keys[0] *= torch.linspace(0.1, 3, 305)[:, None, None]
    case.flat_values[0] = case.flat_keys[0][..., : shape.rank]
    case.keys[case.slots[0] // 4, case.slots[0] % 4] = case.flat_keys[0].to(device)
    query = make_query(shape, 2, device)
    out = decode(shape, case, query, case.lanes, last([305, 40], device), splits=20, launch=SMALL)
    assert_close(out, expected(case, query, [(0, 304), (1, 39)]), shape.dtype)


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_after_the_position_is_read(device: torch.device, splits: int) -> None:
    shape = Shape()
    case = make_latents(shape, [40], device)
    case.keys[case.slots[0][30:] // 4, case.slots[0][30:] % 4] = torch.nan
    query = make_query(shape, 1, device)
    out = decode(shape, case, query, case.lanes, last([30], device), splits=splits, launch=SMALL)
    assert_close(out, expected(case, query, [(0, 29)]), shape.dtype)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_rows_become_zeros(device: torch.device, splits: int) -> None:
    shape = Shape()
    case = make_latents(shape, [9, 33], device)
    query = make_query(shape, 5, device)
    query[2:] = torch.nan
    lanes = torch.tensor([*case.lanes.tolist(), -1, int(case.lanes[0]), -1], dtype=torch.int32, device=device)
    positions = torch.tensor([8, 32, 3, -1, -1], device=device)
    out = decode(shape, case, query, lanes, positions, splits=splits, launch=SMALL)
    assert_close(out[:2], expected(case, query[:2], [(0, 8), (1, 32)]), shape.dtype)
    assert not out[2:].any()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lengths(device: torch.device, data: st.DataObject) -> None:
    shape = Shape(heads=data.draw(st.integers(1, 40)), rank=data.draw(st.integers(1, 40)), dims=8)
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    case = make_latents(shape, lengths, device, seed=data.draw(st.integers(0, 99)))
    query = make_query(shape, len(lengths), device)
    splits = data.draw(st.integers(1, 5))
    out = decode(shape, case, query, case.lanes, last(lengths, device), splits=splits, launch=SMALL)
    assert_close(out, expected(case, query, [(number, n - 1) for number, n in enumerate(lengths)]), shape.dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, splits: int) -> None:
    """With so many splits; their number is chosen by the number of sequences."""
    shape, lengths = Shape(dtype=torch.bfloat16), [50, 7, 33]
    case = make_latents(shape, lengths, device)
    query, positions = make_query(shape, 3, device), last(lengths, device)
    whole = decode(shape, case, query, case.lanes, positions, splits=splits, launch=SMALL)
    for row in range(3):
        one = slice(row, row + 1)
        alone = decode(shape, case, query[one], case.lanes[one], positions[one], splits=splits, launch=SMALL)
        assert torch.equal(alone[0], whole[row])


def test_splits_fill_the_device_and_no_more() -> None:
    few, many = latent_launch(16, torch.bfloat16), latent_launch(128, torch.bfloat16)

    def ask(sequences: int, heads: int, launch: LatentLaunch, max_context: int = 1 << 15, room: int = 256) -> int:
        return latent_splits(sequences, heads, max_context, launch, room * heads, 132)

    assert (many.heads, many.resident) == (LAUNCH.heads, LAUNCH.resident)
    assert ask(1, 128, many) == 64, "two tiles of heads, 64 splits: 128 programs"
    assert ask(16, 128, many) == 4
    assert ask(64, 128, many) == ask(256, 128, many) == 1
    assert ask(80, 128, many) > 1, "or a second round of programs would fill a fifth of the device"
    assert ask(64, 16, few) == 4
    assert ask(256, 16, few) == 1
    assert ask(1, 16, few, max_context=100) <= 4, "no split is less than a tile"
    assert ask(64, 16, few, room=128) <= 2
    assert ask(1, 16, few, room=0) == 1


def test_which_heads_and_pools_fit_hoppers_kernel() -> None:
    def fits(heads: int = 128, rank: int = 512, block_tokens: int = 16, dtype: torch.dtype = torch.bfloat16) -> bool:
        query, latents = torch.zeros(2, heads, rank + 64, dtype=dtype), torch.zeros(6, block_tokens, 1, rank + 64)
        return fits_hopper(query[..., :rank], query[..., rank:], latents.to(dtype)[::3])

    assert fits()
    assert fits(heads=40, dtype=torch.float16)
    assert fits(block_tokens=64)
    assert not fits(heads=32), "half of the products would be for nothing"
    assert not fits(rank=256)
    assert not fits(block_tokens=4), "pages smaller than what the copy engine writes as one"
    assert not fits(dtype=torch.float32)
    query, pool = torch.zeros(1, 128, 576, dtype=torch.bfloat16), torch.zeros(1 << 16, dtype=torch.bfloat16)
    apart = pool.as_strided((3, 16, 1, 576), (16 * 576 + 8, 576, 576, 1))
    assert not fits_hopper(query[..., :512], query[..., 512:], apart), "blocks that do not stand on the grid of tokens"
    odd = pool[4:].as_strided((3, 16, 1, 576), (16 * 576, 576, 576, 1), 4)
    assert not fits_hopper(query[..., :512], query[..., 512:], odd), "an address that the copy engine cannot take"


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    shape = Shape()
    case = make_latents(shape, [40], device)
    query, at = make_query(shape, 1, device), (case.tables, case.lanes, last([40], device))
    parts = query[..., : shape.rank], query[..., shape.rank :]
    out = torch.empty(1, shape.heads, shape.rank, device=device)
    narrow: dict[str, Any] = {
        "scale": SCALE, "out": out, "workspace": decode_workspace(1, shape.heads, shape.rank // 2, device)
    }  # fmt: skip
    attend_latents(*parts, case.keys, *at, **narrow)
    assert_close(out, expected(case, query, [(0, 39)]), shape.dtype)
    with pytest.raises(BadInput, match="room"):
        attend_latents(*parts, case.keys, *at, splits=2, **narrow)
    with pytest.raises(BadInput, match="fit"):
        attend_latents(parts[0][..., :8], parts[1], case.keys, *at, **narrow)
    with pytest.raises(BadInput, match="float16"):
        attend_latents(parts[0].half(), parts[1], case.keys, *at, **narrow)
    with pytest.raises(BadInput, match="contiguous"):
        attend_latents(query[..., : 2 * shape.rank : 2], parts[1], case.keys, *at, **narrow)
    with pytest.raises(BadInput, match="positions"):
        attend_latents(*parts, case.keys, *at[:2], at[2].repeat(2), **narrow)
    attend_latents(parts[0][:0], parts[1][:0], case.keys, *at, **narrow)


# -- what only a GPU can show -------------------------------------------------------------------


LARGE = {
    "DeepSeek-V2-Lite": Shape(16, 512, 64, torch.bfloat16),
    "32 heads": Shape(32, 512, 64, torch.bfloat16),
    "DeepSeek-V3": Shape(128, 512, 64, torch.bfloat16),
    "heads that fill no tile": Shape(80, 512, 64, torch.float16),
    "40 heads, rank 256": Shape(40, 256, 32, torch.float16),
    "float32": Shape(16, 512, 64, torch.float32),
}
large = pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())


def dense(case: Case, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Every sequence's last query, in float64 on the device."""
    rows = []
    for number, row in enumerate(query):
        keys = case.flat_keys[number][: lengths[number], 0].to(query.device).double()
        weights = torch.softmax(row.double() @ keys.T * SCALE, dim=1)
        rows.append(weights @ keys[:, : case.value_dim])
    return torch.stack(rows).cpu()


@pytest.mark.gpu
@large
def test_large(device: torch.device, shape: Shape) -> None:
    """The tiles that are really used, at lengths where every loop turns often; beside the generic kernel's."""
    lengths = [300, 1629, 701, 1223, 17, 1]
    case = make_latents(shape, lengths, device, block_tokens=16)
    query, positions = make_query(shape, len(lengths), device), last(lengths, device)
    want = dense(case, query, lengths)
    # the table's choice, which on Hopper is another kernel for many heads, and the tile for every device
    for launch in (None, latent_launch(shape.heads, shape.dtype)):
        for splits in (None, 1, 7):
            out = decode(shape, case, query, case.lanes, positions, splits=splits, launch=launch)
            assert_close(out, want, shape.dtype)
    generic = torch.empty(len(lengths), shape.heads, shape.rank, dtype=shape.dtype, device=device)
    attend_decode(
        query, case.keys, None, case.tables, case.lanes, positions, scale=SCALE, reach_kind="full", reach_size=0,
        sinks=None, out=generic, workspace=decode_workspace(8, shape.heads, shape.rank, device), value_dim=shape.rank,
    )  # fmt: skip
    assert_close(generic, want, shape.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("block_tokens", [4, 8, 32, 64])
@pytest.mark.parametrize("splits", [1, 2])
def test_large_pages(device: torch.device, block_tokens: int, splits: int) -> None:
    """Of all sizes, with every number of tiles, odd and even, and a last one of every kind."""
    shape, lengths = LARGE["DeepSeek-V3"], [1, 63, 64, 65, 127, 128, 129, 192, 250, 256]
    case = make_latents(shape, lengths, device, block_tokens=block_tokens)
    query, positions = make_query(shape, len(lengths), device), last(lengths, device)
    out = decode(shape, case, query, case.lanes, positions, splits=splits)
    assert_close(out, dense(case, query, lengths), shape.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
def test_large_padding_rows_become_zeros(device: torch.device, splits: int) -> None:
    shape = LARGE["DeepSeek-V3"]
    case = make_latents(shape, [200, 64], device, block_tokens=16)
    query = make_query(shape, 4, device)
    query[2:] = torch.nan
    lanes = torch.cat((case.lanes, case.lanes.new_tensor([-1, 0])))
    positions = torch.tensor([199, 63, 3, -1], device=device)
    out = decode(shape, case, query, lanes, positions, splits=splits)
    assert_close(out[:2], dense(case, query[:2], [200, 64]), shape.dtype)
    assert not out[2:].any()


@pytest.mark.gpu
@large
def test_large_has_the_same_bits_in_any_batch(device: torch.device, shape: Shape) -> None:
    """A sequence alone, among 64, and in a graph with padding, cut into as many splits."""
    lengths = [1 + 37 * number % 900 for number in range(64)]
    case = make_latents(shape, lengths, device, block_tokens=16)
    query, positions = make_query(shape, 64, device), last(lengths, device)
    for splits in (1, 4):
        whole = decode(shape, case, query, case.lanes, positions, splits=splits)
        for row in (0, 5, 31, 63):
            one = slice(row, row + 1)
            alone = decode(shape, case, query[one], case.lanes[one], positions[one], splits=splits)
            assert torch.equal(alone[0], whole[row])
        padded = decode(
            shape, case, torch.cat((query[:3], torch.full_like(query[:1], torch.nan))),
            torch.cat((case.lanes[:3], case.lanes.new_full((1,), -1))), torch.cat((positions[:3], positions[:1])),
            splits=splits,
        )  # fmt: skip
        assert torch.equal(padded[:3], whole[:3])
