"""Products whose rows have bits that depend on neither their place nor the number of rows beside them.

On a CPU every product has 16 rows (`ROWS`) that are contiguous and a multiple of 16 columns, padded with zeros:
libraries choose their kernel, and with it the order of sums, by the shape. Measured with MKL and oneDNN: in tiles of
one shape the bits of a row depend on neither its place, the other rows nor the alignment. They depend on the threads:
on some processors MKL cuts sums of 896 numbers and more among them. So products take one thread. In bfloat16 bits may
depend on the number of columns: where a model is cut, `parallel/slices.py` keeps that number. Where processors have no
products in float16, torch's own loops choose the order by the layout of both sides: there each column of the right side
is contiguous too.
On a GPU the kernels of `fdasync_kernels.linear` walk K in order. The self-check looks at every start whether this
holds. Knows no modules and no autograd. Called by `mode.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: rows of a product on a CPU, and what its columns are a multiple of
ROWS = 16


def product(rows: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [R, K] by [K, N], plus a bias [N] before the rounding: [R, N] of the rows' dtype."""
    if rows.is_cuda:
        from fdasync_kernels.linear.product import linear

        return linear(rows, _walkable(right).t(), bias)
    count, columns = rows.shape[0], right.shape[1]
    right = _laid_out(_padded(right, 1))
    if bias is not None:
        bias = _padded(bias, 0)
    padded = _padded(rows, 0).contiguous()
    with _one_thread():
        if len(padded) == ROWS:
            out = _tile(padded, right, bias)
        else:
            out = padded.new_empty(padded.shape[0], right.shape[1])
            for first in range(0, padded.shape[0], ROWS):
                _tile(padded[first : first + ROWS], right, bias, out=out[first : first + ROWS])
    return out if out.shape == (count, columns) else out[:count, :columns].contiguous()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within the context torch's operations on CPUs take one thread; entering and leaving take a microsecond."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tile(
    rows: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.mm(rows, right, out=out) if bias is None else torch.addmm(bias, rows, right, out=out)


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Rows [B, R, K] by [B, K, N], one by one: [B, R, N]; the bits of one do not depend on B."""
    if left.shape[2] == 1:
        # no sum
        return left * right
    if left.is_cuda:
        from fdasync_kernels.linear.product import batched

        return batched(left if left.stride(2) == 1 else left.contiguous(), _walkable(right))
    if left.dtype != torch.float32:
        # bits of half precision depend on the number of products: heads, which are fewer on a rank
        return torch.stack([product(one, other) for one, other in zip(left, right, strict=True)])
    count, columns = left.shape[1], right.shape[2]
    left, right = _padded(left, 1).contiguous(), _laid_out(_padded(right, 2))
    with _one_thread():
        if left.shape[1] == ROWS:
            out = torch.bmm(left, right)
        else:
            out = left.new_empty(*left.shape[:2], right.shape[2])
            for first in range(0, left.shape[1], ROWS):
                out[:, first : first + ROWS] = torch.bmm(left[:, first : first + ROWS], right)
    return out if out.shape[1:] == (count, columns) else out[:, :count, :columns].contiguous()


def _walkable(right: torch.Tensor) -> torch.Tensor:
    """The matrix with contiguous rows or columns, as the kernels walk them."""
    return right if 1 in right.stride()[-2:] else right.contiguous()


def _laid_out(right: torch.Tensor) -> torch.Tensor:
    """The matrix with contiguous columns, if it is float16."""
    return right.mT.contiguous().mT if right.dtype is torch.float16 else right


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with zeros behind it up to a multiple of `ROWS` along a dimension; itself where it is a multiple."""
    missing = -tensor.shape[dim] % ROWS
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
