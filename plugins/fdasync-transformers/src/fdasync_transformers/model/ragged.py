"""Groups the queries of one flattened step into few rectangular attention calls.

Sequences of one step differ in their numbers of tokens and in their contexts. Padding all to the largest wastes work,
and one call each wastes time on overhead; so sequences of similar shape share a call, and long chunks are cut to bound
the masks. Knows no model. Made once per step by `step.py`, used by every layer's attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync_transformers.model.kv import Reach

# a chunk this long fills a call by itself
_LONG_CHUNK = 64
# most elements of one attention mask
_MASK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Group:
    """P pieces of up to C queries each, and the Lk key positions they may see.

    Attributes:
        pieces, queries: P and C.
        rows: int64 [P * C], row of the step of each query; padding repeats a piece's last row. None when
            they are the rows `first` to `first + P - 1` (C is 1).
        first: see `rows`.
        valid: int64, indices of the queries that are no padding; None: all.
        table: int64 [P * S * n], for `gather`: each piece's blocks; of a pool with S shares a block, one share's after
            the other's.
        mask: [P, 1, C, Lk], 0 where seen and -inf elsewhere; None when plain causal masking does.
        keys: Lk.
    """

    pieces: int
    queries: int
    rows: torch.Tensor | None
    first: int
    valid: torch.Tensor | None
    table: torch.Tensor
    mask: torch.Tensor | None
    keys: int

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D] of the step -> [P, H, C, D]."""
        rows = self.rows
        picked = flat[self.first : self.first + self.pieces] if rows is None else flat.index_select(0, rows)
        return picked.view(self.pieces, self.queries, *flat.shape[1:]).transpose(1, 2)

    def give(self, out: torch.Tensor, flat: torch.Tensor) -> None:
        """Write [P, H, C, D] back to the step's rows [T, H, D]."""
        result = out.transpose(1, 2).reshape(self.pieces * self.queries, *flat.shape[1:])
        if self.rows is None:
            flat[self.first : self.first + self.pieces] = result
        elif self.valid is None:
            flat.index_copy_(0, self.rows, result)
        else:
            flat.index_copy_(0, self.rows.index_select(0, self.valid), result.index_select(0, self.valid))


class RaggedPlan:
    """The groups of one step, made for each reach when a layer first asks for it.

    Arguments are int64 arrays over the S sequences: `counts` tokens in this step, `starts` positions of their first
    tokens, `tables` [S, max_blocks] block ids, at least as many as the positions need.

    With `tile_tokens`, every group has a mask, its first key of each piece stands at a multiple of that, and its number
    of keys is a multiple, too; behind a piece's last block that block comes again, masked. `shares`: of the pool.
    `pair_elements` are the elements that a call takes for each pair of query and key, where a mask's are not the most.
    The pieces of a cut sequence are called one by one, in order. `first_rows` int64 [S]: the step's row of each
    sequence's first token; None: sequences stand side by side. `masks_prompts`: a reach of some layer needs a mask for
    whole prompts, too.
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        tables: NDArray[np.integer],
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        tile_tokens: int = 0,
        shares: int = 1,
        pair_elements: int = 1,
        first_rows: NDArray[np.int64] | None = None,
        *,
        masks_prompts: bool = False,
    ) -> None:
        self._block_tokens = block_tokens
        # blocks between the places where a tile and a block begin together
        self._step = math.lcm(tile_tokens, block_tokens) // block_tokens if tile_tokens else 1
        self._always_masked = tile_tokens > 0
        self._tables = tables
        self._shares = np.arange(shares)[:, None]
        self._device = device
        self._dtype = dtype
        most = _MASK_ELEMENTS // pair_elements
        rows = np.cumsum(counts) - counts if first_rows is None else first_rows
        self._pieces = _cut(counts, starts, rows, self._always_masked or masks_prompts, most)
        self._members = _partition(self._pieces, block_tokens, most)
        self._groups: dict[Reach, list[Group]] = {}

    def groups(self, reach: Reach) -> list[Group]:
        """The calls of a layer with this reach; together they have every sequence's rows once."""
        found = self._groups.get(reach)
        if found is None:
            found = self._groups[reach] = [self._group(members, reach) for members in self._members]
        return found

    def _group(self, members: NDArray[np.int64], reach: Reach) -> Group:
        size = self._block_tokens
        sequence, position, count, row = self._pieces[:, members]
        pieces, queries = len(members), int(count.max())
        steps = np.minimum(np.arange(queries), count[:, None] - 1)
        rows = row[:, None] + steps
        first_block = _first_position(position, reach) // size // self._step * self._step
        last_block = (position + count - 1) // size
        width = -(-(int((last_block - first_block).max()) + 1) // self._step) * self._step
        columns = np.minimum(first_block[:, None] + np.arange(width), last_block[:, None])
        blocks = self._tables[sequence[:, None], columns].astype(np.int64)
        table = blocks[:, None] * len(self._shares) + self._shares
        contiguous = queries == 1 and bool((np.diff(row) == 1).all())
        padded = bool((count != queries).any())
        valid = np.flatnonzero(np.arange(queries) < count[:, None]) if padded else None
        keys = width * size
        causal = (
            pieces == 1 and int(position[0]) == reach.first == 0 and (reach.kind == "full" or queries <= reach.size)
        )
        causal = causal and not self._always_masked
        return Group(
            pieces=pieces,
            queries=queries,
            rows=None if contiguous else self._send(rows.ravel()),
            first=int(row[0]),
            valid=None if valid is None else self._send(valid),
            table=self._send(table.ravel()),
            mask=None if causal else self._mask(position[:, None] + steps, first_block * size, keys, reach),
            keys=queries if causal else keys,
        )

    def _mask(
        self, positions: NDArray[np.int64], first_key: NDArray[np.int64], keys: int, reach: Reach
    ) -> torch.Tensor:
        query = self._send(positions)[:, None, :, None]
        key = (self._send(first_key)[:, None] + torch.arange(keys, device=self._device))[:, None, None, :]
        seen = key <= query
        if reach.kind == "window":
            seen &= key > query - reach.size
        elif reach.kind == "chunk":
            seen &= key // reach.size == query // reach.size
        if reach.first:
            # a query in front of the first position that is seen has no meaning, and is finite: it sees itself
            seen &= (key >= reach.first) | (key == query)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))

    def _send(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _first_position(position: NDArray[np.int64], reach: Reach) -> NDArray[np.int64]:
    """The earliest position that a query at `position` sees."""
    earliest = np.zeros_like(position)
    if reach.kind == "window":
        earliest = position - reach.size + 1
    elif reach.kind == "chunk":
        earliest = position // reach.size * reach.size
    return np.minimum(np.maximum(earliest, reach.first), position)


def _cut(
    counts: NDArray[np.int64], starts: NDArray[np.int64], first_rows: NDArray[np.int64], masked: bool, most: int
) -> NDArray[np.int64]:
    """Pieces as columns [4, P]: sequence, first position, count, first row. Most sequences are one piece."""
    whole = np.stack([np.arange(len(counts)), starts, counts, first_rows])
    # plain causal masking needs no mask, so whole prompts need no cutting
    long = (counts * (starts + counts) > most) & (masked | (starts > 0))
    if not long.any():
        return whole
    columns: list[tuple[int, int, int, int]] = []
    for sequence, start, count, row in whole.T.tolist():
        tile = count if not long[sequence] else max(1, most // (start + count))
        columns.extend((sequence, start + done, min(tile, count - done), row + done) for done in range(0, count, tile))
    return np.array(columns, np.int64).T


def _partition(pieces: NDArray[np.int64], block_tokens: int, most: int) -> list[NDArray[np.int64]]:
    """The pieces of each call: equal powers of two of queries and of blocks; decodes in one if that costs little."""
    sequence, position, count, _ = pieces
    is_cut = np.bincount(sequence)[sequence] > 1
    blocks = (position + count - 1) // block_tokens + 1
    groups: list[NDArray[np.int64]] = []
    decodes = np.flatnonzero((count == 1) & ~is_cut)
    if len(decodes) and len(decodes) * blocks[decodes].max() <= 2 * blocks[decodes].sum():
        groups.append(decodes)
        decodes = decodes[:0]
    buckets: dict[tuple[int, ...], list[int]] = {}
    for index in [*decodes.tolist(), *np.flatnonzero((count > 1) | is_cut).tolist()]:
        queries = int(count[index])
        own = index if queries >= _LONG_CHUNK or is_cut[index] else -1
        buckets.setdefault((own, queries.bit_length(), int(blocks[index]).bit_length()), []).append(index)
    groups.extend(np.array(members, np.int64) for members in buckets.values())
    return [part for members in groups for part in _bounded(members, count, blocks * block_tokens, most)]


def _bounded(
    members: NDArray[np.int64], count: NDArray[np.int64], keys: NDArray[np.int64], most: int
) -> list[NDArray[np.int64]]:
    """Cut a group into parts whose masks stay within `most` elements."""
    pieces = max(1, most // int(count[members].max() * keys[members].max()))
    return [members[first : first + pieces] for first in range(0, len(members), pieces)]
