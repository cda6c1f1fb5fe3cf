"""Products whose rows have bits that depend on neither their place nor the number of rows beside them.

On a CPU every product has 16 rows (`ROWS`) and a multiple of 16 columns, padded with zeros: libraries choose their
kernel, and with it the order of sums, by the shape. Measured with MKL and oneDNN: in tiles of one shape the bits of a
row depend on neither its place, the other rows, the threads nor the alignment; columns in parts have the same bits too.
The self-check looks at every start whether that holds. Knows no modules and no autograd. Called by `mode.py`.
"""

from __future__ import annotations

import torch

#: rows of a product on a CPU, and what its columns are a multiple of
ROWS = 16


def product(rows: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [R, K] by [K, N], plus a bias [N] before the rounding: [R, N] of the rows' dtype."""
    count, columns = rows.shape[0], right.shape[1]
    right = _padded(right, 1)
    if bias is not None:
        bias = _padded(bias, 0)
    padded = _padded(rows, 0)
    out = padded.new_empty(padded.shape[0], right.shape[1])
    for first in range(0, padded.shape[0], ROWS):
        tile = padded[first : first + ROWS]
        part = torch.mm(tile, right) if bias is None else torch.addmm(bias, tile, right)
        out[first : first + ROWS] = part
    return out[:count, :columns].contiguous()


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Rows [B, R, K] by [B, K, N], one by one: [B, R, N]."""
    if left.shape[2] == 1:
        # no sum
        return left * right
    count, columns = left.shape[1], right.shape[2]
    left, right = _padded(left, 1), _padded(right, 2)
    out = left.new_empty(*left.shape[:2], right.shape[2])
    for first in range(0, left.shape[1], ROWS):
        out[:, first : first + ROWS] = torch.bmm(left[:, first : first + ROWS], right)
    return out[:, :count, :columns].contiguous()


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """With zeros behind it up to a multiple of `ROWS` along a dimension; itself where it is one."""
    missing = -tensor.shape[dim] % ROWS
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
