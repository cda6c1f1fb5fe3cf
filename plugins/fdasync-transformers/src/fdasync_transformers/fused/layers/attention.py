"""The attention of a fused layer: one product, one kernel that prepares it, paged attention, the output projection.

Queries, keys and values come from one merged product. One kernel norms and turns them and writes keys and values to the
pool. The attention itself is the step's `Paging`. Under fixed numerics its products are called by their kernels, past
the modes that would find them otherwise: each operation that a mode sees costs the host microseconds. Knows modules of
the library by their parts; knows no decoder layers. Made by `fuse.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import Linear, functional

from fdasync_transformers.fused.layers.merged import merge_linears
from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.model.kept.kept import Kept
from fdasync_transformers.model.kept.linears import kept_product

if TYPE_CHECKING:
    import torch
    from fdasync_kernels.layer.qkv import QkvForm

    from fdasync_transformers.fused.layers.merged import Merged
    from fdasync_transformers.fused.modules import RowsLinear
    from fdasync_transformers.model.attention import Paging, Places
    from fdasync_transformers.model.kv import LayerSpec


@dataclass(frozen=True)
class AttentionKind:
    """What a family's attention does between its projections and its attention function.

    Attributes:
        interleaved: the rotary embedding turns neighbours; else dims half of the turned part apart.
        full_precision: it is computed in float32.
        half_width: its cosines and sines have a column for each pair; else for each dim.
        row_norm: norms of queries and keys, where there are any, are over all heads; else of each head.
        norm_rounds_once: its norms round after their weights.
        clip: name in the config of the bound that queries, keys and values are held within, if it has one.
    """

    interleaved: bool = False
    full_precision: bool = False
    half_width: bool = False
    row_norm: bool = False
    norm_rounds_once: bool = False
    clip: str = ""


class FusedAttention:
    """The attention of one layer.

    Attributes:
        module: the library's.
        form: of its queries, keys and values.
        merged: their product.
    """

    def __init__(self, module: Any, form: QkvForm, merged: Merged) -> None:
        from fdasync_kernels.layer.qkv import prepare_qkv

        self.module = module
        self.form = form
        self.merged = merged
        self._prepare = prepare_qkv
        self._norms = (module.q_norm.weight, module.k_norm.weight) if form.norm else (None, None)
        self._sinks: torch.Tensor | None = getattr(module, "sinks", None)
        self._scaling = float(module.scaling)

    @property
    def plain(self) -> bool:
        """Whether its output projection is nothing but a product."""
        last = self.module.o_proj
        hooked = last._forward_hooks or last._forward_pre_hooks
        return type(last) is Linear and not hooked and "forward" not in vars(last)

    def product(self, normed: torch.Tensor, linear: RowsLinear | None = None) -> torch.Tensor:
        """Queries, keys and values [T, width] of the layer's normed input [T, H].

        `linear`: what computes it past modes.
        """
        weight, bias = self.merged
        if isinstance(weight, Kept):
            return kept_product(normed, weight, bias, proven=True)
        return (linear or functional.linear)(normed, weight, bias)

    def attend(
        self,
        qkv: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        spec: LayerSpec,
        paging: Paging,
        places: Places,
        linear: RowsLinear | None = None,
    ) -> torch.Tensor:
        """Write this step's KV and attend to all of it: the layer's attention [T, H], after its output projection.

        `turns`: cosines and sines [1, T, columns]. `linear`: as `product` has it; the projection must be `plain`.
        """
        cos, sin = turns
        query = self._prepare(qkv, cos[0], sin[0], places.keys, places.values, places.slots, self.form, *self._norms)
        found = paging.attend(spec, query, self._scaling, self._sinks)
        rows, last = found.flatten(1), self.module.o_proj
        projected: torch.Tensor = last(rows) if linear is None else linear(rows, last.weight, last.bias)
        return projected


def fuse_attention(module: Any, kind: AttentionKind, columns: int) -> FusedAttention:
    """The fused attention of a module, whose projections are merged. Raises Differs where it is not built as it was
    known. `columns`: of the cosines and sines that it is handed."""
    from fdasync_kernels.layer.qkv import QkvForm

    projections = [module.q_proj, module.k_proj, module.v_proj]
    dim = int(module.head_dim)
    query, key, value = (linear.weight.shape[0] for linear in projections)
    if key != value or query % dim or key % dim:
        raise Differs(f"its projections of {query}, {key} and {value} are no heads of {dim}")
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if (norms[0] is None) != (norms[1] is None):
        raise Differs("either its queries or its keys have a norm")
    epsilons = {float(norm.variance_epsilon) for norm in norms if norm is not None}
    if len(epsilons) > 1:
        raise Differs("its norms differ")
    merged = merge_linears(projections)
    form = QkvForm(
        heads=query // dim,
        kv_heads=key // dim,
        head_dim=dim,
        rotary_dim=columns * 2 if kind.half_width else columns,
        interleaved=kind.interleaved,
        full_precision=kind.full_precision,
        norm="" if not epsilons else "row" if kind.row_norm else "head",
        eps=epsilons.pop() if epsilons else 0.0,
        norm_rounds_once=kind.norm_rounds_once,
        clip=float(getattr(module.config, kind.clip) or 0.0) if kind.clip else 0.0,
    )
    return FusedAttention(module, form, merged)
