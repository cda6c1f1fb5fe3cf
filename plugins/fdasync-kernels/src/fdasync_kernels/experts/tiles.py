"""Tiles of the experts' kernels by regime: a table made offline for Hopper, and a rule elsewhere.

Regimes go by the pairs of a step and by how many of them an expert gets on average. Tiles change the time and never a
bit of the results, so the table may be made anew at any time (`python -m benchmarks.experts_tiles` at the tag
`benchmarks-whole` made this one). Knows no tensors. Called by `chain.py`.
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
        paired: gate and up rows are one operand of one product, so that 32 columns fill the hardware's 64 rows; for
            `up` with `swap`, only where there are gates, and with `tma` only of weights that stay as stored.
        ready: rows are brought in order before (`inner_order.py`), not as they are read; for `up` with `tma` of weights
            that stay as stored. Rows of `down` are written so.
        many: by the kernels of `many.py`, which need `tma` and no `swap`.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    paired: bool = False
    ready: bool = False
    many: bool = False


@dataclass(frozen=True)
class Tiles:
    """The cut of both products.

    Attributes:
        rows: pairs of a tile; of both products, since one grouping serves them.
        up, down: columns of `up` count the activation's, so a program multiplies with twice as many.
        single: each pair is a tile of its own; nothing is grouped.
        chunk: ids that a program of the grouping takes at a time, in one launch.
        apart: the grouping takes three launches, for many pairs.
    """

    rows: int
    up: Tile
    down: Tile
    single: bool = False
    chunk: int = 512
    apart: bool = False


# By the most pairs of an expert on average. Best at 64, 256, 1,024 and 8,192 tokens of Qwen3-30B-A3B on an H200.
_TABLE: tuple[tuple[float, Tiles], ...] = (
    (12.0, Tiles(16, Tile(64, 128, 4, 3, swap=True, tma=True), Tile(128, 64, 4, 4, swap=True, tma=True))),
    (24.0, Tiles(32, Tile(64, 128, 4, 3), Tile(128, 64, 8, 3, swap=True, tma=True), chunk=1024)),
    (56.0, Tiles(64, Tile(64, 64, 4, 3, swap=True, tma=True), Tile(128, 64, 4, 3, tma=True), chunk=4096)),
    (
        float("inf"),
        Tiles(128, Tile(64, 64, 4, 3, tma=True, many=True), Tile(256, 64, 8, 4, tma=True, many=True), apart=True),
    ),
)
_SINGLE = Tiles(8, Tile(32, 128, 4, 4, swap=True, paired=True), Tile(64, 128, 4, 4, swap=True), single=True)
# The rule elsewhere: at most 96 KB of shared memory, no bulk copies. On Hopper it holds where weights do not fit the
# bulk copy engine and tiles are wide, as a program of the table's widest has too few registers without it.
_ELSEWHERE: tuple[tuple[float, Tiles], ...] = (
    (12.0, Tiles(16, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))),
    (24.0, Tiles(32, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), chunk=1024)),
    (56.0, Tiles(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), chunk=4096)),
    (float("inf"), Tiles(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3), apart=True)),
)
_SINGLE_ELSEWHERE = Tiles(16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), single=True)
# exact products of float32 have no tensor cores: small tiles, or the unrolled code does not fit the registers
_FLOAT32 = Tiles(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), chunk=1024)
_FLOAT32_SINGLE = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), single=True)
# Of weights that stay as they were stored: they are the left side of the product, and fill its 64 rows beside 16 to 64
# pairs. A step of the loop is within a block that shares a scale. By the most pairs of an expert on average; among the
# best for Qwen3-30B-A3B, tiles that serve FP8 and MXFP4 about as well.
_STORED: tuple[tuple[float, Tiles], ...] = (
    (12.0, Tiles(16, Tile(64, 128, 4, 3, swap=True, paired=True), Tile(128, 128, 4, 3, swap=True))),
    (24.0, Tiles(32, Tile(64, 128, 4, 3, swap=True, paired=True), Tile(128, 128, 4, 3, swap=True), chunk=1024)),
    (56.0, Tiles(64, Tile(64, 64, 8, 4, swap=True, paired=True), Tile(128, 64, 4, 4, swap=True), chunk=4096)),
    (
        float("inf"),
        Tiles(64, Tile(64, 64, 8, 4, swap=True, paired=True), Tile(128, 64, 4, 4, swap=True), apart=True),
    ),
)
# of FP8 that the bulk copy engine can read: among the best at 16, 64, 256 and 8,192 tokens, tiles of one cut each
_FEW_UP = Tile(64, 128, 4, 3, swap=True, tma=True, paired=True)
_FEW_DOWN = Tile(128, 128, 4, 3, swap=True, tma=True)
_MANY_UP = Tile(64, 64, 4, 4, swap=True, tma=True, paired=True, ready=True)
_MANY_DOWN = Tile(128, 64, 4, 4, swap=True, tma=True)
_STORED_BULK: tuple[tuple[float, Tiles], ...] = (
    (12.0, Tiles(16, _FEW_UP, _FEW_DOWN)),
    (24.0, Tiles(32, _FEW_UP, _FEW_DOWN, chunk=1024)),
    (56.0, Tiles(64, _MANY_UP, _MANY_DOWN, chunk=4096)),
    (float("inf"), Tiles(128, _MANY_UP, _MANY_DOWN, apart=True)),
)
_STORED_SINGLE = Tiles(16, Tile(32, 128, 4, 3, swap=True, paired=True), Tile(64, 128, 4, 3, swap=True), single=True)


def choose_tiles(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, *, large: bool, bulk: bool) -> Tiles:
    """The tiles of a step.

    Args:
        large: the device has the shared memory and the bulk copy engine of Hopper.
        bulk: the bulk copy engine can read the weights: gate rows before up rows, each contiguous and beginning at a
            multiple of 16 bytes.
    """
    pairs = tokens * top_k
    if dtype == torch.float32:
        return _FLOAT32_SINGLE if pairs <= _SINGLE_PAIRS else _FLOAT32
    if pairs <= _SINGLE_PAIRS:
        return _SINGLE if large else _SINGLE_ELSEWHERE
    regime = next(number for number, (most, _) in enumerate(_TABLE) if pairs <= most * num_experts)
    if not large or (not bulk and regime == len(_TABLE) - 1):
        return _ELSEWHERE[regime][1]
    return _TABLE[regime][1] if bulk else _without_bulk(_TABLE[regime][1])


def choose_stored_tiles(
    tokens: int, top_k: int, num_experts: int, slice_depth: int = 0, *, gated: bool = True, bulk: bool = False
) -> Tiles:
    """The tiles of a step of weights that stay as they were stored.

    Args:
        slice_depth: inner places of a slice of the second product, which its steps divide; 0: it has no slices.
        gated: the first product has rows of gates; without them a program takes twice the columns.
        bulk: they are FP8, on a device whose bulk copy engine can read them (`choose_tiles`).
    """
    pairs = tokens * top_k
    tiles = _STORED_SINGLE
    if pairs > _SINGLE_PAIRS:
        table = _STORED_BULK if bulk else _STORED
        tiles = next(tiles for most, tiles in table if pairs <= most * num_experts)
    if slice_depth % tiles.down.depth:
        tiles = replace(tiles, down=replace(tiles.down, depth=64))
    return tiles if gated else _without_gates(tiles)


def all_stored_tiles(*, gated: bool = True, bulk: bool = False) -> tuple[Tiles, ...]:
    """Whatever `choose_stored_tiles` may answer without slices: for proofs."""
    found = (_STORED_SINGLE, *(tiles for _, tiles in (_STORED_BULK if bulk else _STORED)))
    return found if gated else tuple(_without_gates(tiles) for tiles in found)


def _without_gates(tiles: Tiles) -> Tiles:
    return replace(tiles, up=replace(tiles.up, columns=2 * tiles.up.columns, paired=False))


def all_tiles(dtype: torch.dtype, *, large: bool, bulk: bool) -> tuple[Tiles, ...]:
    """Whatever `choose_tiles` may answer for a model: for proofs."""
    many = 1 << 10  # experts, so that every regime groups
    counts = (1, *(int(min(most, 2 * _TABLE[-2][0])) * many for most, _ in _TABLE))
    return tuple(dict.fromkeys(choose_tiles(count, 1, many, dtype, large=large, bulk=bulk) for count in counts))


def _without_bulk(tiles: Tiles) -> Tiles:
    return replace(tiles, up=replace(tiles.up, tma=False), down=replace(tiles.down, tma=False))
