"""Tiles of the experts' kernels by regime: a table made offline for Hopper, and a rule elsewhere.

Regimes go by the pairs of a step and by how many of them an expert gets on average. Tiles change the time and never a
bit of the results, so the table may be made anew at any time (`python -m benchmarks.experts_tiles`). Knows no
tensors. Called by `chain.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# so few pairs are not grouped
_SINGLE_PAIRS = 32


@dataclass(frozen=True)
class Tile:
    """How one product is cut.

    Attributes:
        columns: of the output, of a program.
        depth: of the inner dimension, of a step of the loop.
        warps, stages: of a program, and of its pipeline of loads.
        swap: weights are the left side of the product: its hardware wants 64 rows there, and tokens are few.
        tma: weights come by the bulk copy engine; for weights that are not transposed.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False


@dataclass(frozen=True)
class Tiles:
    """The cut of both products.

    Attributes:
        rows: pairs of a tile; of both products, since one grouping serves them.
        up, down: columns of `up` are those of the activation, so a program multiplies with twice as many.
        single: each pair is a tile of its own; nothing is grouped.
        chunk: ids that a program of the grouping takes at a time.
    """

    rows: int
    up: Tile
    down: Tile
    single: bool = False
    chunk: int = 512


# By the most pairs of an expert on average. Best at 64, 256, 1,024 and 8,192 tokens of Qwen3-30B-A3B on an H200.
_TABLE: tuple[tuple[float, Tiles], ...] = (
    (12.0, Tiles(16, Tile(64, 128, 4, 3, swap=True, tma=True), Tile(128, 64, 4, 4, swap=True, tma=True))),
    (24.0, Tiles(32, Tile(64, 128, 4, 3), Tile(128, 64, 8, 3, swap=True, tma=True), chunk=1024)),
    (96.0, Tiles(64, Tile(64, 64, 4, 3, swap=True, tma=True), Tile(128, 64, 4, 3, tma=True), chunk=4096)),
    (float("inf"), Tiles(128, Tile(128, 64, 8, 4, tma=True), Tile(256, 64, 8, 3, tma=True), chunk=4096)),
)
_SINGLE = Tiles(16, Tile(64, 128, 4, 4, swap=True), Tile(64, 128, 4, 4, swap=True), single=True)
# without the bulk copy engine a program of the largest tiles has too few registers
_WIDE_PLAIN = Tiles(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3), chunk=4096)
# exact products of float32 have no tensor cores: small tiles, or the unrolled code does not fit the registers
_FLOAT32 = Tiles(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), chunk=1024)
_FLOAT32_SINGLE = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), single=True)


def choose_tiles(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, *, bulk: bool) -> Tiles:
    """The tiles of a step.

    Args:
        bulk: the bulk copy engine can read the weights: rows are contiguous and begin at multiples of 16 bytes.
    """
    pairs = tokens * top_k
    if dtype == torch.float32:
        return _FLOAT32_SINGLE if pairs <= _SINGLE_PAIRS else _FLOAT32
    if pairs <= _SINGLE_PAIRS:
        return _SINGLE
    found = next(tiles for most, tiles in _TABLE if pairs <= most * num_experts)
    if bulk:
        return found
    if found.rows == _WIDE_PLAIN.rows:
        return _WIDE_PLAIN
    return replace(found, up=replace(found.up, tma=False), down=replace(found.down, tma=False))
