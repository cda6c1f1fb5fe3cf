"""Pages of a pool as Hopper's copy engine takes them: 64 elements of a page's tokens at a time.

Knows views of a pool; knows no attention. Called by `prefill_hopper.py` and `latent_hopper.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fdasync_kernels.pages import pages_of

if TYPE_CHECKING:
    import torch


class PageRows(NamedTuple):
    """Rows of the descriptor, which are tokens of a share, from one block or share to the next; heads side by side in a
    row. Head h of token t of block b is in row b * block + h // per_share * share + t, from column h % per_share * dim.
    """

    block: int
    share: int
    per_share: int


def page_rows(view: torch.Tensor) -> PageRows | None:
    """The rows of a pool's view, as `pages_of` takes it, of 16-bit numbers; None: the copy engine cannot load from it.

    It can where tokens of all shares of all blocks stand at one distance, with their heads side by side.
    """
    if view.stride(-1) != 1:
        return None
    pages = pages_of(view)
    apart, share, per_share = pages.token, pages.head, pages.per_share
    if per_share == 1 and (pages.heads == 1 or share == pages.dim):
        share, per_share = 0, pages.heads
    if pages.block_tokens not in (8, 16, 32, 64) or per_share * pages.dim > apart:
        return None
    if pages.block % apart or share % apart or apart % 8 or view.data_ptr() % 16:
        return None
    if view.shape[0] * (pages.block // apart) >= 1 << 30:
        return None
    return PageRows(pages.block // apart, share // apart, per_share)


def page_descriptor(view: torch.Tensor, rows: PageRows) -> TensorDescriptor:
    """The descriptor of boxes of 64 elements of a head's page, for the `page_rows` of this view."""
    pages = pages_of(view)
    last = (view.shape[0] - 1) * rows.block + (pages.heads // rows.per_share - 1) * rows.share
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape = [last + pages.block_tokens, rows.per_share * pages.dim]
    return TensorDescriptor(view, shape, [pages.token, 1], [pages.block_tokens, 64], layout)
