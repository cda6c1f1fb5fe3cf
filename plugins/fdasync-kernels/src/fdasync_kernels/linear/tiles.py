"""Tiles of dense products by the number of rows: made offline for one chip, and a rule for many rows.

Tiles change the time and never a bit of the results. Knows no tensors. Called by `product.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync_kernels.limits import NARROW

if TYPE_CHECKING:
    import torch


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, columns: of a program's tile.
        depth: of the inner dimension, of a step of the loop.
        warps, stages: of a program, and of its pipeline of loads.
        swap: the weights are the rows of the product, so that few rows waste little.
        many: by `many.py`, whose programs take tile after tile.
        together: programs that a processor of the device holds, of `many`.
        parts: in which a tile is stored, of `many`: 1 or 2.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    many: bool = False
    together: int = 1
    parts: int = 1


# By the most rows. Best, or within 3 % of it, of the q/k/v and output projections of Qwen3-30B-A3B on an H200, each
# behind a norm and inside a graph.
_FEW: tuple[tuple[int, Tile], ...] = (
    (1, Tile(1, 16, 256, 1, 6, swap=True)),
    (8, Tile(8, 16, 256, 1, 6, swap=True)),
    (16, Tile(16, 64, 128, 4, 6, swap=True)),
    (32, Tile(32, 64, 128, 4, 5, swap=True)),
)
_MOST_FEW = _FEW[-1][0]
# For up to 64 rows, which wait for weights too: the widest that still occupies the device.
_SOME = (Tile(64, 64, 128, 4, 4, swap=True), Tile(32, 64, 128, 4, 5, swap=True), Tile(64, 16, 128, 4, 4))
_MOST_SOME = 64
# of the processors of a device: programs that suffice to wait for memory
_ENOUGH = 0.45
# For more, with the speed of a processor at each, over the quickest's: times of the same projections at 128 to 4,096
# rows, over the tiles of the processor that gets the most.
_MANY: tuple[tuple[Tile, float], ...] = (
    (Tile(128, 256, 64, 8, 4, many=True, parts=2), 1.0),
    (Tile(128, 128, 64, 8, 4, many=True), 0.87),
    (Tile(128, 64, 128, 4, 3, many=True), 0.5),
    (Tile(64, 64, 128, 4, 4, many=True), 0.45),
)
# in the place of tiles for 17 rows and more, where the bulk copy engine cannot read or write the tensors
_POINTERS = (Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4))
# in the place of tiles that need more than 99 KB of shared memory
_ELSEWHERE = {
    Tile(16, 64, 128, 4, 6, swap=True): Tile(16, 16, 256, 2, 6, swap=True),
    Tile(32, 64, 128, 4, 5, swap=True): Tile(32, 32, 128, 4, 4),
    Tile(64, 64, 128, 4, 4, swap=True): Tile(64, 64, 64, 4, 4),
}
# exact products of float32 have no tensor cores: small tiles, or the unrolled code does not fit the registers
_FLOAT32 = Tile(16, 16, 64, 4, 2)
_FLOAT32_MANY = Tile(64, 64, 16, 4, 3)


def choose_tile(rows: int, outputs: int, dtype: torch.dtype, *, large: bool, bulk: bool, processors: int) -> Tile:
    """The tile of a product.

    Args:
        rows, outputs: of the product; of all products of a batch together.
        large: a program may take 227 KB of shared memory, else 99 KB.
        bulk: the bulk copy engine can read and write the tensors.
        processors: of the device.
    """
    if dtype not in NARROW:
        return _FLOAT32 if rows <= _FLOAT32.rows else _FLOAT32_MANY
    if rows <= _MOST_FEW:
        tile = next(tile for most, tile in _FEW if rows <= most)
    elif rows <= _MOST_SOME:
        tile = _widest(_SOME, rows, outputs, processors)
    elif large and bulk:
        return min(_MANY, key=lambda each: _time(each[0], each[1], rows, outputs, processors))[0]
    else:
        tile = _widest(_POINTERS, rows, outputs, processors)
    return tile if large else _ELSEWHERE.get(tile, tile)


def all_tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Whatever `choose_tile` may answer for a dtype: for tests and measurements."""
    if dtype not in NARROW:
        return _FLOAT32, _FLOAT32_MANY
    many = (tile for tile, _ in _MANY)
    return tuple(dict.fromkeys((*(tile for _, tile in _FEW), *_SOME, *_POINTERS, *_ELSEWHERE.values(), *many)))


def _tiles(tile: Tile, rows: int, outputs: int) -> int:
    return -(-rows // tile.rows) * -(-outputs // tile.columns)


def _widest(tiles: tuple[Tile, ...], rows: int, outputs: int, processors: int) -> Tile:
    """The first of these tiles, wide ones first, that cuts the product into enough programs."""
    return next((tile for tile in tiles if _tiles(tile, rows, outputs) >= _ENOUGH * processors), tiles[-1])


def _time(tile: Tile, speed: float, rows: int, outputs: int, processors: int) -> float:
    """The time of the processor that gets the most tiles."""
    return -(-_tiles(tile, rows, outputs) // processors) * tile.rows * tile.columns / speed
