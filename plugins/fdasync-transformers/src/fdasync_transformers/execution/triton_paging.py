"""Paged attention of one step by kernels that read the pool in place: no gathers, no masks, no padding.

Single-token queries go to the decode kernel, which splits long contexts over the device; chunks of prompts go to the
prefill kernel in tiles. The device reads the lengths, so that a captured graph serves any length. Knows sequences by
number only. Made by `device_step.py`, used by `model/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.decode_rows import WIDEST_KEY, attend_rows
from fdasync_kernels.attention.latent import attend_latents
from fdasync_kernels.attention.prefill import attend_prefill
from fdasync_kernels.store import store_kv

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.attention import Paging, Places

if TYPE_CHECKING:
    from fdasync_kernels.attention.decode import Workspace

    from fdasync_transformers.execution.step_shape import DeviceBatch
    from fdasync_transformers.model.kv import KVPool, LayerSpec


class Workspaces:
    """Partial results of split decodes, allocated once for each shape of attention and used by all its layers."""

    def __init__(self, max_sequences: int, device: torch.device, *, fixed: bool = False) -> None:
        """`fixed`: for attention in the fixed order, whose decodes leave more partial results."""
        self._max_sequences = max_sequences
        self._device = device
        self._fixed = fixed
        self._made: dict[tuple[int, int], Workspace] = {}

    def of(self, heads: int, value_dim: int) -> Workspace:
        """The workspace for queries of so many heads; call it once for each shape before a graph is captured."""
        found = self._made.get((heads, value_dim))
        if found is None:
            found = decode_workspace(self._max_sequences, heads, value_dim, self._device, fixed=self._fixed)
            self._made[heads, value_dim] = found
        return found


@dataclass(frozen=True)
class TritonPaging(Paging):
    """See the module.

    Attributes:
        pool: the KV.
        tables: int32 [lanes, max_blocks].
        batch: the step.
        positions: int64 [T].
        slots: int64 [T], place of each token's KV in the pool; -1: not stored.
        workspaces: of the decode kernel.
        fixed: attend in the fixed order, in which a token's bits depend on its own sequence alone.
        run_rows, run_tiles: where decodes may be several rows of a sequence, the rows of a tile and `row_tiles` of the
            decodes; else 1 and None.
    """

    pool: KVPool
    tables: torch.Tensor
    batch: DeviceBatch
    positions: torch.Tensor
    slots: torch.Tensor
    workspaces: Workspaces = field(repr=False)
    fixed: bool = field(default=False, kw_only=True)
    run_rows: int = field(default=1, kw_only=True)
    run_tiles: torch.Tensor | None = field(default=None, kw_only=True)

    def store(self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor | None) -> None:
        values = None if value is None else self.pool.values[layer.index]
        store_kv(key, value, self.pool.keys[layer.index], values, self.slots)

    def places(self, layer: LayerSpec) -> Places | None:
        if layer.latent_rank or layer.query_scale is not None:
            return None
        return Places(self.pool.keys[layer.index], self.pool.values[layer.index], self.slots)

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        batch, heads = self.batch, query.shape[1]
        keys = self.pool.attended_keys[layer.index]
        values = None if layer.latent_rank else self.pool.attended_values[layer.index]
        value_dim = layer.latent_rank or layer.value_dim
        # the kernels write no row that belongs to no sequence, and routers read all rows
        make = query.new_zeros if batch.padded else query.new_empty
        out = make(query.shape[0], heads, value_dim)
        shared: dict[str, Any] = {
            "scale": scaling,
            **_reach(layer),
            "sinks": sinks,
            "value_dim": value_dim,
            "fixed": self.fixed,
        }
        tiles = self.run_tiles
        if batch.decodes and tiles is not None and values is not None and query.shape[2] <= WIDEST_KEY:
            attend_rows(
                query[: batch.decodes],
                keys,
                values,
                self.tables,
                batch.lanes[: batch.decodes],
                self.positions[: batch.decodes],
                tiles,
                rows=self.run_rows,
                out=out[: batch.decodes],
                workspace=self.workspaces.of(heads, value_dim),
                **{name: value for name, value in shared.items() if name != "value_dim"},
            )
        elif batch.decodes:
            attend_decode(
                query[: batch.decodes],
                keys,
                values,
                self.tables,
                batch.lanes[: batch.decodes],
                self.positions[: batch.decodes],
                out=out[: batch.decodes],
                workspace=self.workspaces.of(heads, value_dim),
                **shared,
            )
        if batch.tiles is not None and batch.counts is not None:
            attend_prefill(
                query,
                keys,
                values,
                self.tables,
                batch.lanes,
                batch.starts,
                batch.first_rows,
                batch.counts,
                batch.tiles,
                out=out,
                **shared,
            )
        return out

    def store_latents(self, layer: LayerSpec, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        # the two parts of a key, each to its part of the pool's row: no copy puts them together first
        keys, rank = self.pool.keys[layer.index], layer.latent_rank
        store_kv(_rows(latent), _rows(rotary), keys[..., :rank], keys[..., rank:], self.slots)

    def attend_latents(
        self, layer: LayerSpec, query: torch.Tensor, rotary: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        batch, heads, rank = self.batch, query.shape[1], layer.latent_rank
        if layer.reach.kind != "full" or layer.reach.first:
            return super().attend_latents(layer, query, rotary, scaling)
        if batch.tiles is None:
            # all rows are decodes; their kernel writes zeros to rows of no sequence
            out = query.new_empty(query.shape)
        else:
            chunks = replace(self, batch=replace(batch, decodes=0))
            out = chunks.attend(layer, torch.cat((query, rotary), dim=-1), scaling, None)
        if batch.decodes:
            ours = slice(batch.decodes)
            attend_latents(
                query[ours],
                _rows(rotary[ours]),
                self.pool.keys[layer.index],
                self.tables,
                batch.lanes[ours],
                self.positions[ours],
                scale=scaling,
                out=out[ours],
                workspace=self.workspaces.of(heads, rank),
                fixed=self.fixed,
            )
        return out


def _reach(layer: LayerSpec) -> dict[str, Any]:
    """As the kernels name it. Raises InvariantBroken for a window that also begins late."""
    reach = layer.reach
    if not reach.first:
        return {"reach_kind": reach.kind, "reach_size": reach.size}
    if reach.kind != "full":
        raise InvariantBroken(f"layer {layer.index} sees a {reach.kind} from position {reach.first} on")
    return {"reach_kind": "from", "reach_size": reach.first}


def _rows(part: torch.Tensor) -> torch.Tensor:
    """Contiguous in its last dimension, which the rotation of some models does not leave so."""
    return part if part.stride(-1) == 1 else part.contiguous()
