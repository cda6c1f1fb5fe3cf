"""The paged KV cache: the shape of each attention layer's KV per token, and the pool of blocks.

A block is one run of bytes, and it is made of shares, one after the other (docs/design.md, section 4). Share s holds,
layer after layer, the keys and then the values of the layer's heads of that share, token after token. So a rank that
computes some of the heads holds one run of every block, and the bytes of a whole block do not depend on the number of
ranks. Knows nothing of models, steps, sequences or other processes. Used by `bound_runner.py` and by the attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fdasync.cache.host_arena import HostPart
from fdasync.errors import ConfigError
from fdasync.runner.shares import Part, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Reach:
    """The positions that a query sees.

    Attributes:
        kind: "full": all up to its own; "window": the last `size` of them; "chunk": those in its own chunk of `size`.
        size: 0 of a full reach.
        first: earlier positions are seen by none.
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0
    first: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, as start-up found it.

    Attributes:
        index: the layer's `layer_idx` in the model.
        kv_heads, key_dim, value_dim: of the KV stored per token, by all ranks together. A latent layer stores one row
            of `key_dim` = rank + rotary dims and no value (`value_dim` 0).
        reach: the positions that its queries see.
        latent_rank: of a latent (MLA) layer, else 0.
        query_scale: (floor scale, attention scale) of a layer whose queries grow with their position, or None.
        per_block: no attention: what is stored belongs to a block and not to its tokens; `key_dim` is a block's share
            of it per token and head, and `value_dim` is 0.
        group: a word in the layout's name; "" for the model's own layers.
    """

    index: int
    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach = Reach()
    latent_rank: int = 0
    query_scale: tuple[float, float] | None = None
    per_block: bool = False
    group: str = ""

    @property
    def token_elements(self) -> int:
        """Elements stored per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KVLayout:
    """All layers' specs and the dtype: enough to size and to name a block; and which part of it one rank holds.

    With S shares, rank r of n holds S / n of them where n divides S. Where S divides n, n / S ranks hold one share
    each, and the lowest of them writes it to the host. With a latent layer there is one share, and all hold it.

    Raises ConfigError for a number of ranks that is neither, and where the ranks of one share cannot part its heads.

    Attributes:
        layers: by rising index, with the heads of the whole model.
        dtype: of keys and values.
        rank, ranks: this process's place among the processes that compute each step together.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError("tensor_parallel", f"rank {self.rank} of {self.ranks}")
        if self.shares % self.ranks and self.ranks % self.shares:
            counts = " and ".join(str(count) for count in sorted({layer.kv_heads for layer in self.layers}))
            problem = f"{self.ranks} ranks cannot part the {counts} KV heads of the model's layers"
            rule = f"a divisor or a multiple of {self.shares}"
            raise ConfigError("tensor_parallel", problem, limit=rule)
        for layer in self.layers:
            heads = layer.kv_heads // self.shares
            if heads % self.sharers and self.sharers % heads:
                problem = f"{self.sharers} ranks of one share cannot part the {heads} heads of layer {layer.index}"
                raise ConfigError("tensor_parallel", problem)

    @property
    def shares(self) -> int:
        """S: the parts into which blocks can be divided, as many as all layers' KV heads allow."""
        return math.gcd(*(layer.kv_heads for layer in self.layers)) or 1

    @property
    def sharers(self) -> int:
        """Ranks that hold the same shares as this one, itself included."""
        return max(1, self.ranks // self.shares)

    @property
    def _part(self) -> Part:
        return part_of(self.shares, self.ranks, self.rank)

    @property
    def held_shares(self) -> int:
        """How many shares this rank holds."""
        return self._part.num_shares

    @property
    def first_share(self) -> int:
        """The first of the shares that this rank holds."""
        return self._part.first

    @property
    def writes(self) -> bool:
        """Whether this rank writes its shares to the host; all read them."""
        return self._part.writes

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token over all layers and ranks."""
        return sum(layer.token_elements for layer in self.layers) * self.dtype.itemsize

    @property
    def held_token_nbytes(self) -> int:
        """Bytes of a token in this rank's pool."""
        return self.token_nbytes // self.shares * self.held_shares

    def stored_heads(self, layer: LayerSpec) -> slice:
        """The KV heads of the model that this rank stores."""
        heads = layer.kv_heads // self.shares
        return slice(self.first_share * heads, (self.first_share + self.held_shares) * heads)

    def attended_heads(self, layer: LayerSpec) -> slice:
        """The KV heads of the model that this rank's queries attend to: fewer than it stores only where several ranks
        hold a share of several heads."""
        stored = self.stored_heads(layer)
        if self.sharers == 1:
            return stored
        heads = stored.stop - stored.start
        first = stored.start + self.rank % self.sharers * heads // self.sharers
        return slice(first, first + max(1, heads // self.sharers))

    @property
    def name(self) -> str:
        """A name for people and namespaces: runs of equal layers as COUNTx(kv_heads,key_dim,value_dim), behind their
        group's name. It is the same on all ranks, whatever their number."""
        runs: list[tuple[tuple[str, int, int, int], int]] = []
        for layer in self.layers:
            shape = (layer.group and f"{layer.group}:", layer.kv_heads, layer.key_dim, layer.value_dim)
            if runs and runs[-1][0] == shape:
                runs[-1] = (shape, runs[-1][1] + 1)
            else:
                runs.append((shape, 1))
        return "shares-first:" + "+".join(f"{group}{count}x({h},{k},{v})" for (group, h, k, v), count in runs)

    def choose_block_tokens(self) -> int:
        """The power of two from 16 to 64 whose block is nearest to 0.5-2 MB (docs/design.md, section 4)."""

        def distance(tokens: int) -> float:
            nbytes = tokens * self.token_nbytes
            return max(0.0, math.log2(5e5 / nbytes), math.log2(nbytes / 2e6))

        return min((16, 32, 64), key=distance)


class KVPool:
    """This rank's part of `num_blocks` blocks, zeroed.

    Attributes:
        block_tokens: tokens of a block.
        shares: how many of the layout's shares are here.
        blocks: [num_blocks, elements]; row b is the part of block b, one run of bytes.
        part: where the rows lie in host blocks, and whether this rank writes them there.
        keys: by layer index, a view [num_blocks, block_tokens, shares, heads of a share, key_dim].
        values: likewise with value_dim; no entry for latent layers.
        attended_keys, attended_values: the same views, of the heads that this rank's queries attend to.

    `allocate` makes the memory, uint8 [nbytes] on the device with any content; None: torch does.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.shares = layout.held_shares
        share = block_tokens * sum(layer.token_elements for layer in layout.layers) // layout.shares
        self.part = HostPart(
            offset_nbytes=layout.first_share * share * layout.dtype.itemsize,
            block_nbytes=layout.shares * share * layout.dtype.itemsize,
            writes=layout.writes,
        )
        self._per_block = {layer.index for layer in layout.layers if layer.per_block}
        if allocate is None:
            self.blocks = torch.zeros(num_blocks, self.shares * share, dtype=layout.dtype, device=device)
        else:
            memory = allocate(num_blocks * self.shares * share * layout.dtype.itemsize)
            self.blocks = memory.view(layout.dtype).view(num_blocks, self.shares * share).zero_()
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.attended_keys: dict[int, torch.Tensor] = {}
        self.attended_values: dict[int, torch.Tensor] = {}
        offset = 0
        for layer in layout.layers:
            heads = layer.kv_heads // layout.shares
            stored, attended = layout.stored_heads(layer), layout.attended_heads(layer)
            first, count = attended.start - stored.start, attended.stop - attended.start
            for views, seen, dim in (
                (self.keys, self.attended_keys, layer.key_dim),
                (self.values, self.attended_values, layer.value_dim),
            ):
                if dim:
                    shape = (num_blocks, block_tokens, self.shares, heads, dim)
                    stride = (self.blocks.stride(0), heads * dim, share, dim, 1)
                    view = views[layer.index] = self.blocks.as_strided(shape, stride, offset)
                    seen[layer.index] = view if attended == stored else view[:, :, :, first : first + count]
                offset += block_tokens * heads * dim

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are about to be filled in part, so that an old NaN in them cannot reach a masked sum."""
        if blocks:
            self.blocks[torch.tensor(blocks, device=self.blocks.device)] = 0

    def clear_past(self, block: int, offset: int) -> None:
        """Zero a block from this token on, for the same reason: the block was copied whole, with any bits behind it."""
        for views in (self.keys, self.values):
            for index, view in views.items():
                if index not in self._per_block:
                    view[block, offset:] = 0


def fresh_tails(
    starts: NDArray[np.int64], ends: NDArray[np.int64], tables: NDArray[np.integer], size: int
) -> list[int]:
    """Blocks that this step begins to fill and does not fill: one per sequence at most."""
    columns = ends // size
    fresh = (ends % size != 0) & (columns * size >= starts)
    tails: list[int] = tables[np.flatnonzero(fresh), columns[fresh]].tolist()
    return tails


def gather(view: torch.Tensor, table: torch.Tensor, rows: int) -> torch.Tensor:
    """Blocks of a layer's view, in table order: [rows, heads, tokens, dim], a copy, which may be written to.

    `view` is a pool's [blocks, tokens, shares, heads of a share, dim], and `table` [rows * shares * n] holds, for each
    share in turn, block * shares + share of n blocks (`Group.table`). Or `view` is [blocks, tokens, heads, dim], and
    `table` holds blocks. No more than these blocks is read: a pool is larger than what is copied here.
    """
    if view.dim() == 4:
        view = view.unsqueeze(2)
    blocks, tokens, shares, heads, dim = view.shape
    # a block's shares stand at one distance, which is that from the last one to the next block's first
    apart = view.stride(2) if shares > 1 else view.stride(0)
    places = view.as_strided((blocks * shares, tokens, heads, dim), (apart, view.stride(1), *view.stride()[3:]))
    picked = places.index_select(0, table)
    if heads == 1:
        return picked.view(rows, shares, -1, dim)
    # copies once more only where there are several shares of several heads each
    return picked.view(rows, shares, -1, heads, dim).transpose(2, 3).flatten(1, 2)
