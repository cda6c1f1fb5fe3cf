"""Proves that a fused layer computes what the library's does, on random rows and the layer's own weights.

Stage by stage on the same inputs, as far as a stage only rounds: equal bits; across norms, whose sums may end in
another last bit: few values on another side of a rounding. Products and the whole layer, whose sums have other orders,
are compared row by row. KV goes to a small pool, and a stand-in for the attention hands the values on. Knows the parts
of fused layers. Called by `fuse.py`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.model import attention as paged
from fdasync_transformers.model.attention import Paging, Places, StepContext
from fdasync_transformers.model.kv import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from fdasync_transformers.fused.layers.layer import FusedLayer

    #: makes what fixed numerics run within: every product has one order
    Exact = Callable[[], AbstractContextManager[Any]]

_ROWS = 16
_BLOCK_TOKENS = 8
# most distance of a row from the library's, over its size, where sums have another order
_ROW_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# of the rows of a whole layer: a near tie in a router may fall the other way
_ALIKE_SHARE = 0.75
# of the values behind a norm: another last bit of its mean moves them over the edge of a rounding
_MOVED_SHARE = 0.02
# random hidden states of the comparison of bits
_EXACT_TRIALS = 8


class _Catch(Paging):
    """Catches what an attention layer hands over; its attention is the values, head by head.

    Attributes:
        query, key, value: as the attention is to have them, [T, heads, D].
        given: the scaling and the sinks.
    """

    def __init__(self, form: Any, example: torch.Tensor, *, pooled: bool) -> None:
        self._groups = form.heads // form.kv_heads
        self._places: Places | None = None
        if pooled:
            blocks = 1 + _ROWS // _BLOCK_TOKENS
            pool = example.new_full((2, blocks, _BLOCK_TOKENS, form.kv_heads, form.head_dim), float("nan"))
            slots = torch.arange(_ROWS, device=example.device).flip(0) + 3
            self._places = Places(pool[0], pool[1], slots)

    def store(self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor | None) -> None:
        del layer
        assert value is not None
        self.key, self.value = key, value

    def places(self, layer: LayerSpec) -> Places | None:
        del layer
        return self._places

    def attend(self, layer: LayerSpec, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None) -> torch.Tensor:
        del layer
        if self._places is not None:
            keys, values, slots = self._places
            self.key, self.value = (view.flatten(0, 1)[slots] for view in (keys, values))
        self.query, self.given = query, (scaling, sinks)
        return self.value.repeat_interleave(self._groups, dim=1)


def hidden_of(model: PreTrainedModel, rows: int, seed: int = 0) -> torch.Tensor:
    """Random hidden states [1, rows, H] of the model's dtype."""
    # a generator of its own leaves the global random state alone
    noise = torch.randn((1, rows, int(model.config.hidden_size)), generator=torch.Generator().manual_seed(seed))
    return noise.to(model.device, model.dtype)


def check_layer(model: PreTrainedModel, follower: Any, rotary: Any, exact: Exact | None, fused: FusedLayer) -> None:
    """Raise Differs unless a fused layer, not yet in use, computes what the library's own does.

    `follower`: the norm module behind the layer that the fused one computes, or None; `rotary`: of the decoder;
    `exact`: within it the whole layer must have the bits of its modules.
    """
    # of a layer behind the model's own it is another one
    config: Any = fused.layer.self_attn.config
    before, its_own = model.config._attn_implementation, config._attn_implementation
    paged.register()
    model.set_attn_implementation(paged.NAME)
    config._attn_implementation = paged.NAME
    try:
        _check_stages(model, fused, follower, rotary)
        if exact is not None:
            _check_bits(model, fused, rotary, exact)
    finally:
        config._attn_implementation = its_own
        model.set_attn_implementation(before)


def _check_stages(model: PreTrainedModel, fused: FusedLayer, follower: Any, rotary: Any) -> None:
    from fdasync_kernels.layer.finish import add_norm, norm_rows

    hidden = hidden_of(model, _ROWS)
    positions = torch.arange(_ROWS, device=hidden.device)[None]
    turns = rotary(hidden, position_ids=positions)
    layer = fused.layer
    block = _checked_attention(fused, layer.input_layernorm(hidden), turns, positions)
    stream, normed = add_norm(block, hidden[0], fused.norms[1])
    check_bits(stream, hidden[0] + block, "the sum behind its attention differs")
    check_moved(normed, layer.post_attention_layernorm(stream), "its norms differ")
    check_moved(norm_rows(hidden[0], fused.norms[0]), layer.input_layernorm(hidden)[0], "its norms differ")
    out = checked_block(fused, stream, normed, follower)
    own, ours = _whole(fused, hidden, positions, turns)
    fused.carry.take(out)
    _check_rows(ours, own, "it returns other hidden states", _ALIKE_SHARE)


def _check_bits(model: PreTrainedModel, fused: FusedLayer, rotary: Any, exact: Exact) -> None:
    """Where every product has one order."""
    for seed in range(_EXACT_TRIALS):
        hidden = hidden_of(model, _ROWS, seed)
        positions = torch.arange(_ROWS, device=hidden.device)[None]
        with exact():
            turns = rotary(hidden, position_ids=positions)
            own, ours = _whole(fused, hidden, positions, turns)
        check_bits(ours, own, "it has other bits than its modules one by one")


def _whole(
    fused: FusedLayer, hidden: torch.Tensor, positions: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [T, H] of the layer's modules, and of the fused layer."""
    whole = []
    for forward, pooled in ((fused.layer.forward, False), (fused, True)):
        context = _context(fused, hidden, positions, pooled=pooled)
        found = forward(hidden, attention_mask=None, position_ids=positions, position_embeddings=turns, fd_ctx=context)
        whole.append(found[0])
    return whole[0], whole[1]


def _context(fused: FusedLayer, example: torch.Tensor, positions: torch.Tensor, *, pooled: bool) -> StepContext:
    form = fused.attention.form
    spec = LayerSpec(int(fused.layer.self_attn.layer_idx), form.kv_heads, form.head_dim, form.head_dim)
    return StepContext({spec.index: spec}, _Catch(form, example, pooled=pooled), positions[0])


def _checked_attention(
    fused: FusedLayer, normed: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """The output of the attention, which does not differ."""
    ours, module = fused.attention, fused.layer.self_attn
    qkv = ours.product(normed[0])
    linears = (module.q_proj, module.k_proj, module.v_proj)
    slices = torch.split(qkv, [linear.weight.shape[0] for linear in linears], dim=-1)
    for part, linear in zip(slices, linears, strict=True):
        _check_rows(part, linear(normed)[0], "its merged product differs")
    theirs = _context(fused, normed, positions, pooled=False)
    # the module's own code on the very product
    with ExitStack() as patches:
        for linear, part in zip(linears, slices, strict=True):
            patches.enter_context(patch.object(linear, "forward", lambda _, part=part: part[None].clone()))
        wanted = module(
            hidden_states=normed, attention_mask=None, position_embeddings=turns, position_ids=positions, fd_ctx=theirs
        )[0]
    context = _context(fused, normed, positions, pooled=True)
    paging: Any = context.paging
    spec = context.layers[int(module.layer_idx)]
    places = paging.places(spec)
    found = ours.attend(qkv, turns, spec, paging, places)
    caught: Any = theirs.paging
    check = check_moved if ours.form.norm else check_bits
    check(paging.query, caught.query, "its queries differ")
    check(paging.key, caught.key, "its keys differ")
    check_bits(paging.value, caught.value, "its values differ")
    scales, sinks = zip(paging.given, caught.given, strict=True)
    if scales[0] != scales[1] or sinks[0] is not sinks[1]:
        raise Differs("its attention has another scaling or other sinks")
    _check_rows(found, wanted[0], "its output projection differs")
    return found


def checked_block(fused: Any, stream: torch.Tensor, normed: torch.Tensor, follower: Any) -> torch.Tensor:
    """The output of the second block of a layer that has `layer`, `block` and `norms`, which does not differ."""
    block = fused.block
    out: torch.Tensor
    out, next_normed = block(normed, stream, fused.norms[2], None)
    apart = block.separately(normed)
    check = check_moved if getattr(block, "gated", False) else check_bits
    check(out, stream + apart, "the sum behind its second block differs")
    own = fused.layer.mlp(normed[None])
    _check_rows(apart, (own[0] if isinstance(own, tuple) else own)[0], "its second block differs")
    if (follower is None) != (next_normed is None):
        raise Differs("it hands on a norm where no fused layer follows")
    if next_normed is not None:
        check_moved(next_normed, follower(out), "the norm that it hands on differs")
    return out


def check_bits(ours: torch.Tensor, wanted: torch.Tensor, reason: str) -> None:
    """Raise Differs unless the bits are the same."""
    if ours.dtype != wanted.dtype or not torch.equal(ours, wanted):
        raise Differs(reason)


def check_moved(ours: torch.Tensor, wanted: torch.Tensor, reason: str) -> None:
    """Raise Differs where values behind a norm differ by more than its last bit can do."""
    if ours.dtype != wanted.dtype or ours.shape != wanted.shape:
        raise Differs(reason)
    distance = (ours.float() - wanted.float()).abs()
    edge = 8 * torch.finfo(ours.dtype).eps * wanted.float().abs().amax(-1, keepdim=True)
    many = ours.dtype is not torch.float32 and float((ours != wanted).float().mean()) > _MOVED_SHARE
    if many or not bool((distance <= edge).all()):
        raise Differs(reason)


def _check_rows(ours: torch.Tensor, wanted: torch.Tensor, reason: str, share: float = 1.0) -> None:
    """Raise Differs unless this share of the rows are alike, up to sums in another order."""
    if ours.dtype != wanted.dtype or ours.shape != wanted.shape:
        raise Differs(reason)
    distance = (ours.float() - wanted.float()).norm(dim=-1)
    near = distance <= _ROW_TOLERANCE[ours.dtype] * wanted.float().norm(dim=-1)
    if not float(near.float().mean()) >= share:
        raise Differs(reason)
