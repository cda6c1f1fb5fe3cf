"""Decode of tiles of rows: what each row computes alone, in any tile, with splits, windows and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_layers import SHAPES, Shape, expected, make_layer, make_query
from attention_reference import Case, assert_close
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.decode_rows import attend_rows, row_tiles, tile_rows
from fdasync_kernels.attention.fixed import Grain
from fixed_attention import SHAPES as LARGE

from fdasync.errors import BadInput

LENGTHS = [3, 17, 60, 9]
# (sequence, position) of each row; -1: padding. The third sequence has more rows than a tile of four
ROWS = [
    (0, 2),
    *[(1, at) for at in range(13, 17)],
    (-1, 0),
    (-1, 0),
    *[(2, at) for at in range(44, 51)],
    (3, 7),
    (3, 8),
]
BLOCKS = {name: shape for name, shape in SHAPES.items() if not shape.latent}
shapes = pytest.mark.parametrize("shape", BLOCKS.values(), ids=BLOCKS.keys())


def attend(
    shape: Shape, case: Case, sinks: Any, query: torch.Tensor, whose: list[tuple[int, int]], rows: int, **more: Any
) -> torch.Tensor:
    """`rows` 1: each row alone."""
    device = query.device
    lanes = torch.stack([case.lanes[one] if one >= 0 else torch.full_like(case.lanes[0], -1) for one, _ in whose])
    positions = torch.tensor([at for _, at in whose], device=device)
    out = torch.full((len(whose), shape.heads, shape.value_dim), torch.nan, dtype=shape.dtype, device=device)
    workspace = decode_workspace(len(whose), shape.heads, shape.value_dim, device, fixed=more.get("fixed", False))
    workspace.partials.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    shared: dict[str, Any] = {
        "scale": 0.3, "reach_kind": shape.reach[0], "reach_size": shape.reach[1], "sinks": sinks, "out": out,
        "workspace": workspace, **more,
    }  # fmt: skip
    pool = (query, case.keys, case.values, case.tables, lanes, positions)
    if rows == 1:
        attend_decode(*pool, **shared)
    else:
        assert case.values is not None
        attend_rows(*pool, row_tiles(lanes, positions, rows), rows=rows, **shared)  # type: ignore[arg-type]
    return out


def assert_right(shape: Shape, case: Case, sinks: Any, query: torch.Tensor, out: torch.Tensor) -> None:
    real = [number for number, (one, _) in enumerate(ROWS) if one >= 0]
    assert_close(out[real], expected(shape, case, sinks, query[real], [ROWS[number] for number in real]), shape.dtype)
    assert not out[[number for number, (one, _) in enumerate(ROWS) if one < 0]].any()


def test_tiles_are_runs_of_rows(device: torch.device) -> None:
    lanes = torch.tensor([7, 3, 3, 3, 3, 3, 3, -1, -1, -1, 2, 2, 2, 5], dtype=torch.int32, device=device)
    positions = torch.tensor([9, 4, 5, 6, 7, 8, 9, 0, 0, 0, 1, 2, 9, 10], device=device)
    found = row_tiles(lanes, positions, 4).tolist()
    firsts = [0, 1, 1, 1, 1, 5, 5, 7, 7, 7, 10, 10, 12, 13]
    counts = {0: 1, 1: 4, 5: 2, 7: 3, 10: 2, 12: 1, 13: 1}
    assert found == [[first, counts[first]] for first in firsts]
    assert [tile_rows(run) for run in (1, 2, 3, 4, 5, 65)] == [1, 2, 4, 4, 8, 16]


@pytest.mark.ci(after=5)
@shapes
@pytest.mark.parametrize("splits", [1, 3])
def test_rows(device: torch.device, shape: Shape, splits: int) -> None:
    case, sinks = make_layer(shape, LENGTHS, device)
    query = make_query(shape, len(ROWS), device)
    assert_right(shape, case, sinks, query, attend(shape, case, sinks, query, ROWS, 4, splits=splits))


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("name", ["four heads a group", "window and sinks", "chunk", "from", "bf16"])
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_in_the_fixed_order(device: torch.device, name: str, splits: int) -> None:
    """Tiles and windows that cross parts of 32 keys."""
    shape = SHAPES[name]
    case, sinks = make_layer(shape, LENGTHS, device)
    query = make_query(shape, len(ROWS), device)
    more: dict[str, Any] = {"splits": splits, "fixed": True, "grain": Grain(16, 16 if shape.reach[1] else 32)}
    assert_right(shape, case, sinks, query, attend(shape, case, sinks, query, ROWS, 4, **more))


def test_what_the_kernel_cannot_do_is_refused(device: torch.device) -> None:
    shape = SHAPES["bf16"]
    case, _ = make_layer(shape, LENGTHS, device)
    query = make_query(shape, len(ROWS), device)
    with pytest.raises(BadInput, match="room"):
        attend(shape, case, None, query, ROWS, 4, splits=10**6)
    wide = Shape(key_dim=272, value_dim=16)
    case, _ = make_layer(wide, LENGTHS, device)
    with pytest.raises(BadInput, match="272"):
        attend(wide, case, None, make_query(wide, len(ROWS), device), ROWS, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, shape in LARGE.items() if not shape.latent])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_bits_are_those_of_single_rows(device: torch.device, name: str, rows: int) -> None:
    """In the fixed order; in the other one numbers are as near as anywhere."""
    shape = LARGE[name]
    case, sinks = make_layer(shape, [2100, 700], device, block_tokens=16)
    whose = [(0, at) for at in range(1020, 1027)] + [(-1, 0)] + [(1, at) for at in range(509, 515)] + [(0, 2099)]
    query = make_query(shape, len(whose), device)
    want = attend(shape, case, sinks, query, whose, 1, fixed=True)
    for splits in (None, 1, 2, 7):
        found = attend(shape, case, sinks, query, whose, rows, fixed=True, splits=splits)
        assert torch.equal(found, want), splits
        assert_close(attend(shape, case, sinks, query, whose, rows, splits=splits), want.double().cpu(), shape.dtype)
