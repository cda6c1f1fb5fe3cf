"""Attention over paged KV: the one function that every model calls through the library's interface.

Stateless: the keyword `fd_ctx` carries all inputs of a step, and the model's forward hands it down to each attention
layer. Registered as an attention function only, never as a mask function, so the library builds no masks. Knows no
sequences and no scheduling: a `Paging` knows where KV is and which rows attend to which (`TorchPaging` here,
`triton_paging.py` on GPUs). Used by `step.py` and `device_step.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fdasync.errors import RunnerError
from fdasync_transformers.model.chosen import attend_chosen
from fdasync_transformers.model.kv import gather
from fdasync_transformers.model.sinks import attend_with_sinks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.model.kv import KVPool, LayerSpec
    from fdasync_transformers.model.ragged import Group, RaggedPlan

NAME = "fdasync_paged"

#: arguments that some models give their attention and this function does not support
NOT_DONE = ("softcap", "position_bias", "cu_seq_lens_q", "block_table")


class LatentCatcher:
    """Stands in for the library's cache, to get the latents of an MLA layer before they are expanded.

    The layer calls `update` right before its attention function, which takes the latents.
    """

    def __init__(self) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, latent: torch.Tensor, rotary: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, 1, T, rank] and rotary keys [B, 1, T, dims]; both are returned as they are."""
        del layer_idx, args, kwargs
        self._held = (latent, rotary)
        return latent, rotary

    def get_seq_length(self, layer_idx: int = 0) -> int:
        del layer_idx
        return 0

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents [B * T, 1, rank] and the rotary keys [B * T, 1, dims] of the running layer."""
        if self._held is None:
            raise RunnerError("a latent attention layer did not show its latents")
        latent, rotary = self._held
        self._held = None
        return latent.transpose(1, 2).flatten(0, 1), rotary.transpose(1, 2).flatten(0, 1)


class Places(NamedTuple):
    """Where this step's KV of a layer goes, for a kernel that writes it itself.

    Attributes:
        keys, values: the layer's views of the pool, as `KVPool` has them.
        slots: int64 [T], place of each token's KV; -1: not stored.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor


class Paging(ABC):
    """Stores the KV of one step, and attends to it; made for each step."""

    @abstractmethod
    def store(self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write this step's keys [T, KH, Dk] and values [T, KH, Dv] (None: a latent layer) into the pool."""

    @abstractmethod
    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        """Queries [T, H, Dk] against the keys that each may see, this step's included: [T, H, Dv].

        Dv of a latent layer is its rank: the leading part of its keys.
        """

    def attend_chosen(
        self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None, chosen: torch.Tensor
    ) -> torch.Tensor:
        """`attend`, to the positions `chosen` int [T, k] alone (-1: none). Raises RunnerError where it is not done."""
        del layer, query, scaling, sinks, chosen
        raise RunnerError(f"{type(self).__name__} attends to no chosen positions")

    def places(self, layer: LayerSpec) -> Places | None:
        """The places for a kernel that does the work of `store`; None: no such kernel runs here."""
        del layer
        return None

    def store_latents(self, layer: LayerSpec, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        """`store` of a latent layer, whose key is a latent [T, 1, rank] and a rotary part [T, 1, dims]."""
        self.store(layer, torch.cat((latent, rotary), dim=-1), None)

    def attend_latents(
        self, layer: LayerSpec, query: torch.Tensor, rotary: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """`attend` of a latent layer by absorbed queries [T, H, rank] and their rotary part [T, H, dims]."""
        return self.attend(layer, torch.cat((query, rotary), dim=-1), scaling, None)


@dataclass(frozen=True)
class StepContext:
    """The inputs of the attention layers in one step.

    Attributes:
        layers: spec by layer index.
        paging: stores and reads the KV.
        positions: int64 [T], absolute position of each token.
        latents: of MLA layers; handed to the model as its cache where there are any.
    """

    layers: Mapping[int, LayerSpec]
    paging: Paging
    positions: torch.Tensor
    latents: LatentCatcher = field(default_factory=LatentCatcher)


def register() -> None:
    """Make the function known to the library under `NAME`; harmless when repeated."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    fd_ctx: StepContext,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's KV, then attend to all of it: query [1, H, T, Dk] -> [1, T, H, Dv].

    `scaling` is the model's (never derived), `s_aux` [H] are attention sinks: one more logit per head whose
    probability is dropped. `indices` int [1, T, k] are the positions that queries read, where an indexer picked them
    (-1: none). A window in `kwargs` is ignored: `probe.py` found the real one at start-up.
    Raises RunnerError for any other argument that would change the result.
    """
    del attention_mask
    for name in NOT_DONE:
        if kwargs.get(name) is not None:
            raise RunnerError(f"attention with {name!r} is not supported")
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]  # a number, which torch does not know
    spec = fd_ctx.layers[layer_idx]
    rows = query[0].transpose(0, 1)
    if spec.query_scale is not None:
        rows = scale_queries(rows, fd_ctx.positions, *spec.query_scale)
    if spec.latent_rank:
        fd_ctx.paging.store_latents(spec, *fd_ctx.latents.take())
        up_keys, up_values = latent_projections(module, spec.latent_rank)
        nope = up_keys.shape[1]
        absorbed = _by_head(rows[..., :nope], up_keys)
        if indices is None:
            out = fd_ctx.paging.attend_latents(spec, absorbed, rows[..., nope:], scaling)
        else:
            joined = torch.cat((absorbed, rows[..., nope:]), dim=-1)
            out = fd_ctx.paging.attend_chosen(spec, joined, scaling, s_aux, indices[0])
        return _by_head(out, up_values.transpose(1, 2)).unsqueeze(0), None
    fd_ctx.paging.store(spec, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if indices is not None:
        return fd_ctx.paging.attend_chosen(spec, rows, scaling, s_aux, indices[0]).unsqueeze(0), None
    return fd_ctx.paging.attend(spec, rows, scaling, s_aux).unsqueeze(0), None


@dataclass(frozen=True)
class TorchPaging(Paging):
    """Paging by torch's own attention, for CPUs: gathers blocks, and pads sequences of like shape to the longest.

    Attributes:
        pool: the KV.
        plan: which rows attend to which keys.
        blocks, offsets: int64 [T], place of each token's KV in the pool.
        rows: int64 [n], the rows that are tokens of a sequence; None: all. Attention is zero in others.
    """

    pool: KVPool
    plan: RaggedPlan
    blocks: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None = None

    def store(self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self._store(self.pool.keys[layer.index], key)
        if value is not None:
            self._store(self.pool.values[layer.index], value)

    def _store(self, view: torch.Tensor, given: torch.Tensor) -> None:
        blocks, offsets = self.blocks, self.offsets
        if self.rows is not None:
            blocks, offsets, given = blocks[self.rows], offsets[self.rows], given[self.rows]
        view[blocks, offsets] = given.reshape(len(given), *view.shape[2:])

    def empty(self, query: torch.Tensor, width: int) -> torch.Tensor:
        """Where the attention of these queries [T, H, D] goes: [T, H, width]."""
        make = query.new_empty if self.rows is None else query.new_zeros
        return make(*query.shape[:2], width)

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        keys = self.pool.attended_keys[layer.index]
        groups = self.plan.groups(layer.reach)
        if layer.latent_rank:
            # values are the keys' leading part; taking all of them keeps both head sizes equal, which is fast
            out = self.empty(query, keys.shape[-1])
            return _attend(query, keys, keys, groups, scaling, None, out)[..., : layer.latent_rank]
        values = self.pool.attended_values[layer.index]
        return _attend(query, keys, values, groups, scaling, sinks, self.empty(query, values.shape[-1]))

    def attend_chosen(
        self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None, chosen: torch.Tensor
    ) -> torch.Tensor:
        keys = self.pool.attended_keys[layer.index]
        values = keys if layer.latent_rank else self.pool.attended_values[layer.index]
        out = self.empty(query, values.shape[-1])
        attend_chosen(query, keys, values, self.plan.groups(layer.reach), chosen, scaling, sinks, out)
        return out[..., : layer.latent_rank] if layer.latent_rank else out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: list[Group],
    scaling: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, H, Dk] against views of a pool, in `out` [T, H, Dv], which is returned."""
    for group in groups:
        q = group.take(query)
        k = gather(keys, group.table, group.pieces)[:, :, : group.keys]
        v = k if values is keys else gather(values, group.table, group.pieces)[:, :, : group.keys]
        if sinks is not None:
            result = attend_with_sinks(q, k, v, group.mask, scaling, sinks)
        elif group.queries == 1 and group.mask is not None:
            # heads that share keys become queries of one head: fewer, larger products
            packed = q.reshape(group.pieces, k.shape[1], -1, q.shape[-1])
            result = scaled_dot_product_attention(packed, k, v, attn_mask=group.mask, scale=scaling)
            result = result.reshape(group.pieces, -1, 1, v.shape[-1])
        else:
            result = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        group.give(result, out)
    return out


def latent_projections(module: torch.nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an MLA layer's up-projection: keys [H, nope dims, rank] and values [H, value dims, rank]."""
    layer: Any = module
    nope = int(layer.qk_nope_head_dim)
    weight: torch.Tensor = layer.kv_b_proj.weight.view(-1, nope + int(layer.v_head_dim), rank)
    return weight[:, :nope], weight[:, nope:]


def _by_head(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows [T, H, a] by each head's weights [H, a, b]: [T, H, b], contiguous, by one product and no copy."""
    out = rows.new_empty(*rows.shape[:2], weights.shape[2])
    torch.bmm(rows.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out


def scale_queries(rows: torch.Tensor, positions: torch.Tensor, floor: float, scale: float) -> torch.Tensor:
    """Llama 4's query temperature (arXiv 2501.19399), by absolute position instead of by row of the batch."""
    factor = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
    return (rows * factor[:, None, None]).to(rows.dtype)
