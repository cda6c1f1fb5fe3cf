"""Replaces decoder layers of known families by few kernels each.

A fused layer is: merged product, preparation with the write of KV, attention, output projection, residual and norm,
router, experts, and the end of the layer, which also norms the next layer's input (or the model's last norm). That norm
is handed on beside the hidden states (`Carry`) and holds for that very tensor; for any other the norm is computed.

Layers are known by class: someone read the library's code and found the structure below (transformers 5.17 and 5.23).
Each is compared with the library's own before it is replaced (`layer_proof.py`); what differs keeps the library's code.
A fused layer runs where a step's KV can be written by a kernel, and calls the library's code in any other pass. It has
no gradient. Knows no steps. Called at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.attention import AttentionKind, FusedAttention, fuse_attention
from fdasync_transformers.fused.feed_forward import BlockKind, make_block
from fdasync_transformers.model.attention import StepContext
from fdasync_transformers.model.families import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync.gpu.kernels.finish import Norm
    from fdasync_transformers.fused.feed_forward import DenseBlock, ExpertsBlock


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


class Carry:
    """The norm of the hidden states that a fused layer has just handed on, until the next one takes it."""

    def __init__(self) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def give(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, T, H] of a stream [T, H] whose norm is `normed`."""
        whole = hidden.unsqueeze(0)
        self._held = (whole, hidden, normed)
        return whole

    def take(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The stream [T, H] and its norm, if they were given for this very tensor. Holds nothing afterwards."""
        held, self._held = self._held, None
        return held[1:] if held is not None and held[0] is whole else None


class FusedLayer:
    """The forward of one decoder layer.

    Attributes:
        layer: the library's.
        attention, block: its halves.
        norms: of the inputs of both; then that of the next layer's input, None where it is not fused.
        carry: of the model.
    """

    def __init__(
        self,
        layer: Any,
        attention: FusedAttention,
        block: DenseBlock | ExpertsBlock,
        norms: tuple[Norm, Norm, Norm | None],
        carry: Carry,
    ) -> None:
        from fdasync.gpu.kernels.finish import add_norm, norm_rows

        self.layer = layer
        self.attention = attention
        self.block = block
        self.norms = norms
        self.carry = carry
        self._own = layer.forward
        self._index = int(layer.self_attn.layer_idx)
        self._add_norm = add_norm
        self._norm_rows = norm_rows

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own forward: hidden states [1, T, H] -> the same."""
        context: Any = kwargs.get("fd_ctx")
        places = None
        if isinstance(context, StepContext) and not args:
            spec = context.layers[self._index]
            places = context.paging.places(spec)
        if places is None:
            own: torch.Tensor = self._own(hidden_states, *args, **kwargs)
            return own
        first, second, third = self.norms
        held = self.carry.take(hidden_states)
        if held is None:
            stream = hidden_states[0]
            normed = self._norm_rows(stream, first)
        else:
            stream, normed = held
        qkv = self.attention.product(normed)
        block = self.attention.attend(qkv, kwargs["position_embeddings"], spec, context.paging, places)
        stream, normed = self._add_norm(block, stream, second)
        stream, following = self.block(normed, stream, third, places.slots)
        return stream.unsqueeze(0) if following is None else self.carry.give(stream, following)


@dataclass
class FusedLayers:
    """Layers that were replaced.

    Attributes:
        indices: of the fused layers, rising.
        notes: for people: which layers keep the library's code, and why.
    """

    indices: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    _replaced: list[tuple[Any, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Give every layer its own forward back, before what was replaced earlier is undone; may be called twice.
        Merged weights stay merged."""
        for module, before in reversed(self._replaced):
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._replaced.clear()
        self.indices = ()


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel) -> FusedLayers:
    """Replace the decoder layers of a model that are of a known kind, in place.

    Merges the weights of their queries, keys and values: they keep names and values, and get new addresses. Runs each
    layer by both ways on a few random rows and compares, so it waits for the device: for start-up, once the experts
    have their implementation, and before anything is captured or recorded.

    Args:
        model: in inference; its weights have their final place and dtype.

    Returns:
        What was fused, and notes on the rest.
    """
    from fdasync_transformers.fused.layer_proof import difference, hidden_of

    try:
        from fdasync.gpu.kernels.router import runs_on
    except ModuleNotFoundError as error:
        return FusedLayers(notes=(f"decoder layers are the library's own: no module {error.name}",))
    decoder: Any = decoder_of(model)
    layers = list(decoder.layers) if hasattr(decoder, "layers") else []
    kinds = {type(layer).__name__ for layer in layers}
    unknown = kinds - _KNOWN.keys()
    if unknown or not kinds:
        which = ", ".join(sorted(unknown)) or "what holds them"
        return FusedLayers(notes=(f"decoder layers are the library's own: {which} is of no known kind",))
    if not runs_on(model.device):
        return FusedLayers(notes=(f"decoder layers are the library's own: no kernels on {model.device}",))
    carry = Carry()
    kept: dict[str, list[int]] = {}
    fused: dict[int, FusedLayer] = {}
    cos, _ = decoder.rotary_emb(
        hidden_of(model, 1), position_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    )
    # the last first: a layer norms the next one's input only where that one is fused
    for number, layer in reversed(list(enumerate(layers))):
        last = number == len(layers) - 1
        follower = decoder.norm if last else layers[number + 1].input_layernorm if number + 1 in fused else None
        made = _fuse(layer, follower, carry, cos.shape[-1])
        problem = made if isinstance(made, str) else difference(model, made, follower, decoder.rotary_emb)
        if isinstance(made, str) or problem:
            kept.setdefault(problem, []).append(number)
        else:
            fused[number] = made
    replaced: list[tuple[Any, Any]] = []
    for number in sorted(fused):
        replaced.append((layers[number], layers[number].__dict__.get("forward")))
        layers[number].forward = fused[number]
    if len(layers) - 1 in fused:
        replaced.append((decoder.norm, decoder.norm.__dict__.get("forward")))
        decoder.norm.forward = _LastNorm(decoder.norm, carry)
    if model.device.type == "cuda":
        # the parts' former memory
        torch.cuda.empty_cache()
    notes = [
        f"decoder layers {', '.join(map(str, sorted(numbers)))} are the library's own: {problem}"
        for problem, numbers in kept.items()
    ]
    return FusedLayers(tuple(sorted(fused)), tuple(notes), replaced)


class _LastNorm:
    """The forward of the norm behind the last layer."""

    def __init__(self, module: Any, carry: Carry) -> None:
        self._own = module.forward
        self._carry = carry

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        held = self._carry.take(hidden_states)
        normed: torch.Tensor = self._own(hidden_states) if held is None else held[1].unsqueeze(0)
        return normed


def _fuse(layer: Any, follower: Any, carry: Carry, columns: int) -> FusedLayer | str:
    """A fused layer, not yet in use; a reason where it is not built as it was known."""
    from fdasync.gpu.kernels.finish import Norm

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
    return FusedLayer(layer, attention, make_block(layer.mlp, kind.block), (first, second, third), carry)
