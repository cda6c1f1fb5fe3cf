"""Attention of a trainer's model with the rollout's bits, and with gradients.

The values are the rollout's (`segments.py`); the backward pass recomputes each sequence by torch's own attention and
takes the gradients of that. Latent attention is absorbed, as in a rollout: queries and outputs go through the layer's
up-projection, and one key head of latents is attended to. Stateless: the keyword `fd_ctx` carries what a pass needs.
Knows no batches and no engines. Registered with the library and called by its layers, within `trainer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.fused.modules import past_modes
from fdasync_transformers.model.attention import (
    NOT_DONE,
    LatentCatcher,
    latent_projections,
    scale_queries,
)
from fdasync_transformers.model.sinks import attend_with_sinks
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fdasync.errors import BadInput, UnsupportedModel
from fdasync_trainer.replay.packing import FIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fdasync_transformers.model.kv import LayerSpec, Reach

    from fdasync_trainer.numerics.segments import Segments, Together

# of a head, in torch's flash attention
_MOST_FLASH_DIMS = 256
# of several sequences that are recomputed at once with all scores in memory: 256 MiB in float32
_MOST_SCORES = 1 << 26


@dataclass(frozen=True)
class PassContext:
    """The inputs of the attention layers in one forward pass, and in its recomputations.

    Attributes:
        layers: spec by layer index.
        segments: the batch's sequences.
        watch: called by each layer; raises where a recomputation would have other bits.
        latents: of the running layer.
    """

    layers: Mapping[int, LayerSpec]
    segments: Segments
    watch: Callable[[], None]
    latents: LatentCatcher = field(default_factory=LatentCatcher)


def register() -> None:
    """Make the function known to the library under `FIXED`; harmless when repeated."""
    AttentionInterface.register(FIXED, trainer_attention)


def catch_latents(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook (with keywords) of a latent attention layer: it gets a catcher of its own as its cache."""
    context = kwargs.get("fd_ctx")
    if not isinstance(context, PassContext):
        return None
    context = replace(context, latents=LatentCatcher())
    return args, {**kwargs, "fd_ctx": context, "past_key_values": context.latents}


def trainer_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    fd_ctx: PassContext | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query [B, H, T, Dk], key [B, KH, T, Dk], value [B, KH, T, Dv] -> [B, T, H, Dv]; zeros at padding.

    `scaling` is the model's, `s_aux` [H] are attention sinks, a window in `kwargs` is the probe's to find. Raises
    BadInput outside of a pass of `fixed_numerics` and for dropout, UnsupportedModel for other arguments that would
    change the result and for up-projections of latents that are more than a weight.
    """
    del attention_mask
    if fd_ctx is None:
        raise BadInput("model", "a part of it was called within fixed_numerics", hint="call the model itself")
    name = f"layer {module.layer_idx}: {type(module).__name__}"
    if dropout:
        raise BadInput("model", f"{name} drops attention weights ({dropout})", hint="set it to 0, or call model.eval()")
    for argument in (*NOT_DONE, "indices"):
        if kwargs.get(argument) is not None:
            raise UnsupportedModel(name, f"attention with {argument!r}")
    fd_ctx.watch()
    spec = fd_ctx.layers[int(module.layer_idx)]  # type: ignore[arg-type]  # a number, which torch does not know
    if not spec.latent_rank and spec.query_scale is None:
        return _attend(query, key, value, s_aux, fd_ctx.segments, spec.reach, scaling), None
    batch = query.shape[0]
    rows = _rows(query)
    if spec.query_scale is not None:
        rows = scale_queries(rows, fd_ctx.segments.positions, *spec.query_scale)
    if not spec.latent_rank:
        out = _attend(rows, _rows(key), _rows(value), s_aux, fd_ctx.segments, spec.reach, scaling)
        return out.view(batch, -1, *out.shape[1:]), None
    values, rotary = fd_ctx.latents.take()
    up_keys, up_values = _projections(module, spec.latent_rank, name)
    nope = up_keys.shape[1]
    absorbed = torch.cat((_by_head(rows[..., :nope], up_keys), rows[..., nope:]), dim=-1)
    keys = torch.cat((values, rotary), dim=-1)
    out = _attend(absorbed, keys, values, None, fd_ctx.segments, spec.reach, scaling, latent=True)
    out = _by_head(out, up_values.transpose(1, 2))
    return out.view(batch, -1, *out.shape[1:]), None


def _projections(module: Any, rank: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    up = module.kv_b_proj
    if type(up) is not torch.nn.Linear:
        raise UnsupportedModel(
            name, f"kv_b_proj is a {type(up).__name__}, and absorbed attention takes a plain Linear's weight alone"
        )
    return latent_projections(module, rank)


def _by_head(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows [R, H, a] by each head's weights [H, a, b]: [R, H, b]."""
    return torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    segments: Segments,
    reach: Reach,
    scaling: float,
    *,
    latent: bool = False,
) -> torch.Tensor:
    # torch has no types here
    out: torch.Tensor = _Attend.apply(query, key, value, sinks, segments, reach, scaling, latent)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    """`Segments.attend`, whose backward pass recomputes it by torch's own attention.

    Takes rows [R, H, D] or batches [B, H, T, D], and gives rows [R, H, Dv] or [B, T, H, Dv].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        segments: Segments,
        reach: Reach,
        scaling: float,
        latent: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.given = segments, reach, scaling
        with past_modes():
            rows, keys, values = _rows(query), _rows(key), _rows(value)
        out = segments.attend(rows, keys, values, reach, scaling, sinks, latent=latent)
        if query.dim() == 3:
            return out
        # no view for autograd
        with past_modes():
            # torch has no types here
            return torch.ops.aten._unsafe_view(out, [query.shape[0], query.shape[2], *out.shape[1:]])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, sinks = ctx.saved_tensors
        segments, reach, scaling = ctx.given
        rows = [_rows(part).detach() for part in (query, key, value)]
        given = grad if grad.dim() == 3 else grad.flatten(0, 1)
        # with sinks all scores are in memory
        batches = segments.together(None if sinks is None else _MOST_SCORES // query.shape[1])
        if len(batches) == 1 and batches[0].rows is None:
            found, of_sinks = _grads(batches[0], rows, sinks, given, reach, scaling)
        else:
            new: Any = torch.empty_like if segments.whole else torch.zeros_like
            found = [new(part, memory_format=torch.contiguous_format) for part in rows]
            of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
            for batch in batches:
                grads, more = _grads(batch, rows, sinks, given, reach, scaling)
                for whole, part in zip(found, grads, strict=True):
                    _put(whole, batch, part.flatten(0, 1))
                if of_sinks is not None and more is not None:
                    of_sinks += more
        shape = (query.shape[0], query.shape[2]) if query.dim() == 4 else rows[0].shape[:1]
        found = [part.reshape(*shape, *part.shape[-2:]) for part in found]
        if query.dim() == 4:
            found = [part.transpose(1, 2) for part in found]
        return *found, None if of_sinks is None else of_sinks.to(sinks.dtype), None, None, None, None


def _rows(part: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] as rows [B * T, H, D]; rows as they are."""
    return part if part.dim() == 3 else part.transpose(1, 2).flatten(0, 1)


def _grads(
    batch: Together,
    rows: list[torch.Tensor],
    sinks: torch.Tensor | None,
    given: torch.Tensor,
    reach: Reach,
    scaling: float,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Gradients [S, L, H, D] of the queries, keys and values of some sequences, and of the sinks, from the gradients of
    their results [R, H, Dv]."""
    at = batch.rows
    parts = [part if at is None else part.index_select(0, at) for part in rows]
    parts = [part.view(batch.sequences, batch.longest, *part.shape[1:]).requires_grad_() for part in parts]
    if sinks is not None:
        parts.append(sinks.detach().requires_grad_())
    with torch.enable_grad():
        out = _plain(*parts, reach=reach, scaling=scaling)
    if at is not None:
        given = given.index_select(0, at)
    if batch.real is not None:
        # what is padded behind a sequence is seen by nothing before it, and gets no gradient
        given = torch.zeros_like(given).index_copy_(0, batch.real, given.index_select(0, batch.real))
    found = torch.autograd.grad(out, parts, given.reshape(out.shape))
    return list(found[:3]), None if sinks is None else found[3]


def _put(whole: torch.Tensor, batch: Together, part: torch.Tensor) -> None:
    """Write a batch's rows [S * L, H, D] where they belong in the flattened batch; none of its padding."""
    at = batch.rows
    assert at is not None
    if batch.real is not None:
        at, part = at.index_select(0, batch.real), part.index_select(0, batch.real)
    whole.index_copy_(0, at, part)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    reach: Reach,
    scaling: float,
) -> torch.Tensor:
    """Whole sequences, queries [S, T, H, Dk]: [S, T, H, Dv], with gradients."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    mask = _mask(query.shape[1], reach, query)
    if sinks is not None:
        out = attend_with_sinks(q, k, v, mask, scaling, sinks)
    else:
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _flashes(q, v, mask):
            # of torch's kernels for the rest, none that keeps the scores out of memory takes groups
            k, v = (_spread(part, q.shape[1]) for part in (k, v))
            grouped = False
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _flashes(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether torch's flash attention takes them on a GPU."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return mask is None and narrow and query.shape[-1] == value.shape[-1] <= _MOST_FLASH_DIMS


def _spread(part: torch.Tensor, heads: int) -> torch.Tensor:
    """[S, KH, T, D] for each query head, [S, H, T, D]."""
    sequences, groups, tokens, dim = part.shape
    return part[:, :, None].expand(-1, -1, heads // groups, -1, -1).reshape(sequences, heads, tokens, dim)


def _mask(length: int, reach: Reach, like: torch.Tensor) -> torch.Tensor | None:
    """[1, 1, T, T], -inf where not seen; None: plain causal masking."""
    if reach.kind == "full" or length <= reach.size:
        return None
    query = torch.arange(length, device=like.device)[:, None]
    key = torch.arange(length, device=like.device)
    near = key > query - reach.size if reach.kind == "window" else key // reach.size == query // reach.size
    return like.new_zeros(1, 1, length, length).masked_fill_(~(near & (key <= query)), float("-inf"))
