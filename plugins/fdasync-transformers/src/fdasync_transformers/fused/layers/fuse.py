"""Replaces decoder layers of known families by few kernels each.

A fused layer is: merged product, preparation with the write of KV, attention, output projection, residual and norm,
router, experts, and the end of the layer with the norm of the next one (`layer.py`). Layers are known by class: someone
read the library's code and found that structure (transformers 5.23). Each is compared with the library's own
before it is replaced (`proof.py`); what differs keeps the library's code. Knows no steps. Called at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.layers import hybrid
from fdasync_transformers.fused.layers.attention import AttentionKind, fuse_attention
from fdasync_transformers.fused.layers.feed_forward import BlockKind, make_block
from fdasync_transformers.fused.layers.layer import Carry, FusedLayer, LastNorm
from fdasync_transformers.fused.layers.proof import hidden_of
from fdasync_transformers.fused.proofs import alone, guarded
from fdasync_transformers.model.families import decoder_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from fdasync_transformers.fused.layers.proof import Exact
    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.proofs import Agree
    from fdasync_transformers.parallel.sums import Sums


@dataclass(frozen=True)
class LayerKind:
    """A known decoder layer: x = x + attention(norm(x)), then x = x + block(norm(x)).

    Attributes:
        attention, block: of the family.
    """

    attention: AttentionKind = field(default_factory=AttentionKind)
    block: BlockKind = field(default_factory=BlockKind)


_KNOWN = {
    # interleaved rotary embedding in float32, no norms of heads, shared experts perhaps, dense layers perhaps
    "Ernie4_5_MoeDecoderLayer": LayerKind(
        AttentionKind(interleaved=True, full_precision=True), BlockKind(shared="shared_experts")
    ),
    # a part of a head is turned, norms of heads perhaps, shared experts, dense layers first
    "Glm4MoeDecoderLayer": LayerKind(block=BlockKind(shared="shared_experts")),
    # sinks, cosines of pairs, norms that round once
    "GptOssDecoderLayer": LayerKind(AttentionKind(half_width=True, norm_rounds_once=True), BlockKind(router="router")),
    # neither norms of heads nor shared experts
    "MixtralDecoderLayer": LayerKind(),
    # norms over all heads, and a bound perhaps
    "OlmoeDecoderLayer": LayerKind(AttentionKind(row_norm=True, clip="clip_qkv")),
    # biased projections, a gated shared expert, dense layers perhaps
    "Qwen2MoeDecoderLayer": LayerKind(block=BlockKind(shared="shared_expert", shared_gate="shared_expert_gate")),
    # norms of heads, dense layers perhaps
    "Qwen3MoeDecoderLayer": LayerKind(),
}

# sizes of rows at which norms within layers have the bits of norms by themselves (`fdasync_kernels/layer/norm.py`)
_EXACT_COLUMNS = 16


@dataclass(frozen=True)
class FusedLayers:
    """Layers that were replaced.

    Attributes:
        indices: of the fused layers, rising.
        notes: for people: which layers keep the library's code, and why.
    """

    indices: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel,
    *,
    exact: Exact | None = None,
    sums: Sums | None = None,
    agree: Agree = alone,
    further: Sequence[torch.nn.Module] = (),
    live: LiveRows | None = None,
) -> FusedLayers:
    """Replace the decoder layers of a model that are of a known kind, in place.

    Merges the weights of their queries, keys and values: they keep names and values, and get new addresses. Runs each
    layer by both ways on a few random rows and compares, so it waits for the device: for start-up, once the experts
    have their implementation, and before anything is captured or recorded.

    Args:
        model: in inference; its weights have their final place and dtype.
        exact: makes what fixed numerics run within: only layers are fused that have the bits of their operations one
            by one, as a trainer runs them. Norms must have been fused by themselves (`fuse_operations`).
        sums: of the ranks of a group, which are apart meanwhile.
        agree: what the ranks make of a reason not to fuse a layer.
        further: layers behind the model's own, numbered on; none is fed by another of them.
        live: says which rows of a step count, to layers whose attention half stays the library's own.

    Returns:
        What was fused, and notes on the rest.
    """
    try:
        from fdasync_kernels.chip import runs_on
    except ModuleNotFoundError as error:
        return FusedLayers(notes=(f"decoder layers are the library's own: no module {error.name}",))
    decoder: Any = decoder_of(model)
    own = list(decoder.layers) if hasattr(decoder, "layers") else []
    layers = [*own, *further]
    kinds = {type(layer).__name__ for layer in layers}
    if kinds and kinds <= set(hybrid.KNOWN) and live is not None and sums is None and exact is None:
        return _fuse_hybrid(model, layers, live, agree)
    unknown = kinds - _KNOWN.keys()
    if unknown or not kinds:
        which = ", ".join(sorted(unknown)) or "what holds them"
        return FusedLayers(notes=(f"decoder layers are the library's own: {which} is of no known kind",))
    if not runs_on(model.device):
        return FusedLayers(notes=(f"decoder layers are the library's own: no kernels on {model.device}",))
    carry = Carry()
    kept: dict[str, list[int]] = {}
    fused: dict[int, FusedLayer] = {}
    columns = guarded(partial(_columns, model, decoder), str)
    if isinstance(columns, str):
        return FusedLayers(notes=(f"decoder layers are the library's own: of the rotary embedding, {columns}",))
    # the last first: a layer norms the next one's input only where that one is fused
    for number, layer in reversed(list(enumerate(layers))):
        follower = None
        if number == len(own) - 1:
            follower = decoder.norm
        elif number < len(own) and number + 1 in fused:
            follower = layers[number + 1].input_layernorm
        made = guarded(partial(_proven, model, layer, follower, carry, columns, exact, sums), str)
        problem = agree(made if isinstance(made, str) else "")
        if problem or isinstance(made, str):
            kept.setdefault(problem, []).append(number)
        else:
            fused[number] = made
    for number, one in fused.items():
        layers[number].forward = one
    if len(own) - 1 in fused:
        decoder.norm.forward = LastNorm(decoder.norm, carry)
    if model.device.type == "cuda":
        # the parts' former memory
        torch.cuda.empty_cache()
    notes = [
        f"decoder layers {', '.join(map(str, sorted(numbers)))} are the library's own: {problem}"
        for problem, numbers in kept.items()
    ]
    return FusedLayers(tuple(sorted(fused)), tuple(notes))


def _fuse_hybrid(model: PreTrainedModel, layers: Sequence[Any], live: LiveRows, agree: Agree) -> FusedLayers:
    """What is around the attention of each layer."""
    fused, kept = [], dict[str, list[int]]()
    for number, layer in enumerate(layers):
        made = guarded(partial(hybrid.prove, model, layer, live), str)
        problem = agree(made if isinstance(made, str) else "")
        if problem or isinstance(made, str):
            kept.setdefault(problem, []).append(number)
        else:
            layer.forward = made
            fused.append(number)
    notes = [f"decoder layers {', '.join(map(str, one))} are the library's own: {why}" for why, one in kept.items()]
    return FusedLayers(tuple(fused), tuple(notes))


def _columns(model: Any, decoder: Any) -> int | str:
    """The columns of the cosines that attention layers are handed."""
    position = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    cos, _ = decoder.rotary_emb(hidden_of(model, 1), position_ids=position)
    return int(cos.shape[-1])


def _proven(
    model: Any, layer: Any, follower: Any, carry: Carry, columns: int, exact: Exact | None, sums: Sums | None
) -> FusedLayer | str:
    """A fused layer that computes what the layer does; a reason where there is none."""
    from fdasync_transformers.fused.layers.proof import difference

    made = _fuse(layer, follower, carry, columns, exact=exact is not None, sums=sums)
    if isinstance(made, str):
        return made
    rotary: Any = decoder_of(model).rotary_emb
    problem = _inexact(made, follower) if exact else ""
    return problem or difference(model, made, follower, rotary, exact=exact) or made


def _inexact(fused: FusedLayer, follower: Any) -> str:
    """Why a layer's bits may differ from its operations' bits, whatever few rows show."""
    layer, form = fused.layer, fused.attention.form
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *([] if follower is None else [follower])]
    if form.norm:
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    if any("forward" not in vars(norm) for norm in norms):
        return "a norm of it is the library's own, and sums in another order"
    if form.norm == "row":
        return "the norms over all heads are summed in another order than by themselves"
    if any(norm.weight.numel() % _EXACT_COLUMNS for norm in norms):
        return f"it norms rows that are no multiple of {_EXACT_COLUMNS}"
    return ""


def _fuse(layer: Any, follower: Any, carry: Carry, columns: int, *, exact: bool, sums: Sums | None) -> FusedLayer | str:
    """A fused layer, not yet in use; a reason where it is not built as it was known."""
    from fdasync_kernels.layer.finish import Norm

    kind = _KNOWN[type(layer).__name__]
    attention = fuse_attention(layer.self_attn, kind.attention, columns)
    if isinstance(attention, str):
        return attention
    once = kind.attention.norm_rounds_once
    norms = [
        None if module is None else Norm(module.weight, float(module.variance_epsilon), once)
        for module in (layer.input_layernorm, layer.post_attention_layernorm, follower)
    ]
    first, second, third = norms
    assert first is not None
    assert second is not None
    block = make_block(layer.mlp, kind.block, exact=exact, sums=sums)
    return FusedLayer(layer, attention, block, (first, second, third), carry, sums)
