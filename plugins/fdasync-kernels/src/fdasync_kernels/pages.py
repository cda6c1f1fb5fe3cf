"""How kernels find a head's keys or values in a pool of blocks.

A pool's blocks are made of shares, one after the other, and a share has some heads of every layer. With one head a
share, or with one share, any two neighbouring heads stand at one distance; else heads of a share stand side by side,
and shares at a distance. Knows views; knows no attention and no models. Called by the kernels that read or write pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from fdasync.errors import BadInput

if TYPE_CHECKING:
    import torch


class Pages(NamedTuple):
    """A layer's keys or values in a pool, in elements.

    Attributes:
        block_tokens: of a block.
        heads, dim: of a token.
        block, token: from one block or token to the next.
        head: from one share to the next; from one head to the next where `per_share` is 1.
        per_share: heads side by side in a share; 1 also where all heads stand at one distance.
    """

    block_tokens: int
    heads: int
    dim: int
    block: int
    token: int
    head: int
    per_share: int


def pages_of(view: torch.Tensor) -> Pages:
    """Pages of [num_blocks, block_tokens, shares, heads of a share, dim], or [num_blocks, block_tokens, heads, dim].

    Raises BadInput where the kernels cannot read it: the last dimension has a stride, or heads of a share a gap.
    """
    stride = view.stride()
    if stride[-1] != 1:
        raise BadInput("keys", "the last dimension must be contiguous")
    if view.dim() == 4:
        _, tokens, heads, dim = view.shape
        return Pages(tokens, heads, dim, stride[0], stride[1], stride[2], 1)
    _, tokens, shares, heads, dim = view.shape
    if shares == 1 or heads == 1:
        return Pages(tokens, shares * heads, dim, stride[0], stride[1], stride[3 if shares == 1 else 2], 1)
    if stride[3] != dim:
        raise BadInput("keys", "heads of a share must stand side by side")
    return Pages(tokens, shares * heads, dim, stride[0], stride[1], stride[2], heads)


@triton.jit
def head_offset(head, apart, DIM: tl.constexpr, PER_SHARE: tl.constexpr):
    """Where a head begins; `apart` is `Pages.head`."""
    if PER_SHARE == 1:
        return head * apart
    else:
        return head // PER_SHARE * apart + head % PER_SHARE * DIM
