"""Pages of a pool as Hopper's copy engine takes them: 64 elements of a page's tokens at a time.

Knows views of a pool; knows no attention. Called by `prefill_hopper.py` and `latent_hopper.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    import torch


def fits_pages(view: torch.Tensor) -> bool:
    """Whether the copy engine can load from this [num_blocks, block_tokens, heads, dim] view of a pool of 16-bit
    numbers: heads of a token side by side, all tokens of all blocks at one distance."""
    blocks, block_tokens, heads, dim = view.shape
    apart = view.stride(1)
    if block_tokens not in (8, 16, 32, 64) or view.stride(3) != 1 or (heads > 1 and view.stride(2) != dim):
        return False
    if view.stride(0) % apart or apart % 8 or view.data_ptr() % 16:
        return False
    return blocks * (view.stride(0) // apart) < 1 << 30


def page_descriptor(view: torch.Tensor) -> TensorDescriptor:
    """Of boxes of 64 elements of a page's tokens; a row is a token of any block. The view must fit."""
    blocks, block_tokens, heads, dim = view.shape
    apart = view.stride(1)
    rows = (blocks - 1) * (view.stride(0) // apart) + block_tokens
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(view, [rows, heads * dim], [apart, 1], [block_tokens, 64], layout)
