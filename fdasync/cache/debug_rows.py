"""Rows that a runner records under `routing_debug`: each names its token's position, so that it can be checked.

A cell of such a row is a digit of the absolute position, so a row that was moved, lost, doubled or given to the
wrong token is detected, whatever the model. The module knows numpy and specs, no model. Runners call it when rows come
off their device, and `engine/output.py` when they come to a request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput, InvariantBroken

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fdasync.cache.aux import AuxSpec


def debug_rows(positions: ArrayLike, spec: AuxSpec) -> NDArray[np.generic]:
    """Debug rows of tokens at these absolute positions.

    Cell (layer row l, slot k) of a uint8 spec is base-256 digit number (l * K + k) % 4 of (position + 1), plus l,
    modulo 256; of a uint16 spec base-65536 digit number (l * K + k) % 2, plus l, modulo 65536. All K slots count,
    those past a layer's own k too. Digit 0 is the lowest.

    Args:
        positions: [n] integers, 0 or more.
        spec: the routing's; shape (L, K).

    Returns:
        [n, L, K] of the spec's dtype, new.

    Raises:
        BadInput: the spec is not of two dimensions, or not uint8 or uint16.
    """
    if len(spec.shape) != 2 or spec.dtype not in ("uint8", "uint16"):
        raise BadInput("spec", f"{spec.dtype} {spec.shape} where uint8 or uint16 (layers, k) was expected")
    bits, digits = (8, 4) if spec.dtype == "uint8" else (16, 2)
    cell = np.arange(math.prod(spec.shape), dtype=np.int64).reshape(spec.shape)
    layer = np.arange(spec.shape[0], dtype=np.int64)[:, None]
    number = np.asarray(positions, dtype=np.int64)[:, None, None] + 1
    rows = (number >> (cell % digits * bits)) + layer
    return (rows & ((1 << bits) - 1)).astype(spec.dtype)


def check_debug_rows(rows: NDArray[np.generic], positions: ArrayLike, spec: AuxSpec, where: str) -> None:
    """Raise InvariantBroken, naming position and layer, unless `rows` [n, L, K] belong to these positions [n].

    `where` says in words where the rows were found.
    """
    wanted = debug_rows(positions, spec)
    if rows.shape == wanted.shape and (rows == wanted).all():
        return
    if rows.shape != wanted.shape:
        raise InvariantBroken(f"routing_debug: rows of shape {rows.shape} {where}, {wanted.shape} were expected")
    row, layer, slot = (int(number) for number in np.argwhere(rows != wanted)[0])
    position = int(np.asarray(positions)[row])
    raise InvariantBroken(
        f"routing_debug: {where} the row of position {position} has {rows[row, layer, slot]} in layer row {layer}, "
        f"slot {slot}, where {wanted[row, layer, slot]} says that it is this position's"
    )
