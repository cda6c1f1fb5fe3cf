"""Replaces decoder layers of known families by few kernels each.

A fused layer is: merged product, preparation with the write of KV, attention, output projection, residual and norm,
router, experts, and the end of the layer with the norm of the next one (`layer.py`). Layers are known by class: someone
read the library's code and found that structure (transformers 5.23). Each is compared with the library's own
before it is replaced (`proof.py`); what differs keeps the library's code. Knows no steps. Called at start-up.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.layer.finish import Norm

from fdasync_transformers.fused.known import HYBRID_LAYERS, LAYERS
from fdasync_transformers.fused.layers.attention import fuse_attention
from fdasync_transformers.fused.layers.feed_forward import make_block
from fdasync_transformers.fused.layers.hybrid import HybridLayer, check_hybrid
from fdasync_transformers.fused.layers.layer import Carry, FusedLayer, LastNorm
from fdasync_transformers.fused.layers.proof import check_layer, hidden_of
from fdasync_transformers.fused.replacement import Differs, Place, Replacement
from fdasync_transformers.model.families import decoder_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from fdasync_transformers.fused.layers.proof import Exact
    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.replacement import Case
    from fdasync_transformers.parallel.sums import Sums


# sizes of rows at which norms within layers have the bits of norms by themselves (`fdasync_kernels/layer/norm.py`)
_EXACT_COLUMNS = 16


class Layers(Replacement[FusedLayer | HybridLayer]):
    """Decoder layers of known kinds.

    Merges the weights of their queries, keys and values: they keep names and values, and get new addresses. For
    start-up, once the experts have their implementation, and before anything is captured or recorded.

    Args:
        further: layers behind the model's own, numbered on; none of these is fed by another of them.
        exact: makes what fixed numerics run within: only layers are fused that have the bits of their operations one
            by one, as a trainer runs them. Norms must have been fused by themselves (`fuse_operations`).
        sums: of the ranks of a group, which are apart meanwhile.
        live: says which rows of a step count, to layers whose attention half stays the library's own; None: no such
            layer is fused, nor in a group or with fixed numerics.
    """

    what = which = "decoder layers"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        further: Sequence[torch.nn.Module] = (),
        exact: Exact | None = None,
        sums: Sums | None = None,
        live: LiveRows | None = None,
    ) -> None:
        self.carry = Carry()
        self._model = model
        self._decoder: Any = decoder_of(model)
        self._own = list(getattr(self._decoder, "layers", ()))
        self._layers: list[Any] = [*self._own, *further]
        self._exact = exact
        self._sums = sums
        self._live = live if sums is None and exact is None else None
        self._fused: set[int] = set()

    def finds(self, model: Any) -> Iterator[Place]:
        """The last first: a layer norms the next one's input only where that one is fused."""
        del model
        known = LAYERS.keys() if self._live is None else {*LAYERS, *HYBRID_LAYERS}
        unknown = {type(layer).__name__ for layer in self._layers} - known
        if unknown or not self._layers:
            which = ", ".join(sorted(unknown)) or "what holds them"
            yield Place("", None, "", refusal=f"{which} is of no known kind")
            return
        last = len(self._own) - 1
        for number, layer in reversed(list(enumerate(self._layers))):
            follower = None
            if number == last:
                follower = self._decoder.norm
            elif number < last and number + 1 in self._fused:
                follower = self._layers[number + 1].input_layernorm
            yield Place(str(number), layer, str(number), given=follower)

    def candidates(self, place: Place) -> Iterator[FusedLayer | HybridLayer]:
        if type(place.module).__name__ in HYBRID_LAYERS and self._live is not None:
            yield HybridLayer(place.module, self._live)
            return
        exact = self._exact is not None
        made = _make(place.module, place.given, self.carry, self._columns, exact=exact, sums=self._sums)
        if exact:
            _check_order(made, place.given)
        yield made

    def cases(self, place: Place) -> list[Case[FusedLayer | HybridLayer]]:
        def computes(made: FusedLayer | HybridLayer) -> None:
            if isinstance(made, HybridLayer):
                check_hybrid(self._model, made)
            else:
                check_layer(self._model, place.given, self._decoder.rotary_emb, self._exact, made)

        return [computes]

    def put(self, place: Place, candidate: FusedLayer | HybridLayer) -> None:
        place.module.forward = candidate
        number = int(place.name)
        self._fused.add(number)
        if number == len(self._own) - 1 and isinstance(candidate, FusedLayer):
            self._decoder.norm.forward = LastNorm(self._decoder.norm, self.carry)

    @cached_property
    def _columns(self) -> int:
        """Of the cosines that attention layers are handed."""
        position = torch.zeros((1, 1), dtype=torch.int64, device=self._model.device)
        cos, _ = self._decoder.rotary_emb(hidden_of(self._model, 1), position_ids=position)
        return int(cos.shape[-1])


def _check_order(fused: FusedLayer, follower: Any) -> None:
    """Raise Differs where a layer's bits may differ from its operations' bits, whatever few rows show."""
    layer, form = fused.layer, fused.attention.form
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *([] if follower is None else [follower])]
    if form.norm:
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    if any("forward" not in vars(norm) for norm in norms):
        raise Differs("a norm of it is the library's own, and sums in another order")
    if form.norm == "row":
        raise Differs("the norms over all heads are summed in another order than by themselves")
    if any(norm.weight.numel() % _EXACT_COLUMNS for norm in norms):
        raise Differs(f"it norms rows that are no multiple of {_EXACT_COLUMNS}")


def _make(layer: Any, follower: Any, carry: Carry, columns: int, *, exact: bool, sums: Sums | None) -> FusedLayer:
    """A fused layer, not yet in use; raises Differs where it is not built as it was known."""
    kind = LAYERS[type(layer).__name__]
    attention = fuse_attention(layer.self_attn, kind.attention, columns)
    once = kind.attention.norm_rounds_once
    first, second = (
        Norm(module.weight, float(module.variance_epsilon), once)
        for module in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    third = None if follower is None else Norm(follower.weight, float(follower.variance_epsilon), once)
    block = make_block(layer.mlp, kind.block, exact=exact, sums=sums)
    return FusedLayer(layer, attention, block, (first, second, third), carry, sums)
