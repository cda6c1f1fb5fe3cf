"""The paged KV cache: the shape of each attention layer's KV per token, and the pool of blocks.

A block is one run of bytes over all layers, and each layer's keys and values are strided views of the pool
(docs/design.md, section 4). Knows nothing of models, steps or sequences. Used by `runner.py` and by the attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Reach:
    """The positions that a query sees.

    Attributes:
        kind: "full": all up to its own; "window": the last `size` of them; "chunk": those in its own chunk of `size`.
        size: 0 of a full reach.
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, as start-up found it.

    Attributes:
        index: the layer's `layer_idx` in the model.
        kv_heads, key_dim, value_dim: of the KV stored per token. A latent layer stores one row of
            `key_dim` = rank + rotary dims and no value (`value_dim` 0).
        reach: the positions that its queries see.
        latent_rank: of a latent (MLA) layer, else 0.
        query_scale: (floor scale, attention scale) of a layer whose queries grow with their position, or None.
    """

    index: int
    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach = Reach()
    latent_rank: int = 0
    query_scale: tuple[float, float] | None = None

    @property
    def token_elements(self) -> int:
        """Elements stored per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KVLayout:
    """All layers' specs and the dtype: enough to size and to name a block.

    Attributes:
        layers: by rising index.
        dtype: of keys and values.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token over all layers."""
        return sum(layer.token_elements for layer in self.layers) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """For people and for namespaces: runs of equal layers as COUNTx(kv_heads,key_dim,value_dim)."""
        runs: list[tuple[tuple[int, int, int], int]] = []
        for layer in self.layers:
            shape = (layer.kv_heads, layer.key_dim, layer.value_dim)
            if runs and runs[-1][0] == shape:
                runs[-1] = (shape, runs[-1][1] + 1)
            else:
                runs.append((shape, 1))
        return "page-first:" + "+".join(f"{count}x({h},{k},{v})" for (h, k, v), count in runs)

    def choose_block_tokens(self) -> int:
        """The power of two from 16 to 64 whose block is nearest to 0.5-2 MB (docs/design.md, section 4)."""

        def distance(tokens: int) -> float:
            nbytes = tokens * self.token_nbytes
            return max(0.0, math.log2(5e5 / nbytes), math.log2(nbytes / 2e6))

        return min((16, 32, 64), key=distance)


class KVPool:
    """`num_blocks` blocks, zeroed.

    Attributes:
        block_tokens: tokens of a block.
        blocks: [num_blocks, elements]; row b is block b, one run of bytes.
        keys: by layer index, a view [num_blocks, block_tokens, kv_heads, key_dim].
        values: likewise with value_dim; no entry for latent layers.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self.block_tokens = block_tokens
        elements = block_tokens * sum(layer.token_elements for layer in layout.layers)
        self.blocks = torch.zeros(num_blocks, elements, dtype=layout.dtype, device=device)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        offset = 0
        for layer in layout.layers:
            for views, dim in ((self.keys, layer.key_dim), (self.values, layer.value_dim)):
                width = block_tokens * layer.kv_heads * dim
                if width:
                    shape = (num_blocks, block_tokens, layer.kv_heads, dim)
                    stride = (self.blocks.stride(0), layer.kv_heads * dim, dim, 1)
                    views[layer.index] = self.blocks.as_strided(shape, stride, offset)
                offset += width

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are about to be filled in part, so that an old NaN in them cannot reach a masked sum."""
        if blocks:
            self.blocks[torch.tensor(blocks, device=self.blocks.device)] = 0

    def clear_past(self, block: int, offset: int) -> None:
        """Zero a block from this token on, for the same reason: the block was copied whole, with any bits behind it."""
        for views in (self.keys, self.values):
            for view in views.values():
                view[block, offset:] = 0


def gather(view: torch.Tensor, table: torch.Tensor, rows: int) -> torch.Tensor:
    """Blocks of a layer's view, in table order: [rows, heads, tokens, dim] (dims 1 and 2 swapped, not copied).

    `table` is [rows * n] block ids; the result is a copy and may be written to.
    """
    picked = view.flatten(1).index_select(0, table)
    return picked.view(rows, -1, view.shape[2], view.shape[3]).transpose(1, 2)
