"""Makes a model one rank's: its tensors become the parts that this rank holds, its partial outputs are summed.

The model is on the meta device, so that no rank ever holds it whole. Afterwards the library's own code runs on the
parts: its modules take their sizes from their tensors. Knows modules of the library; knows no checkpoints. Called by
`start/open_model.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.shares import MOST_RANKS, works_with
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kept.linears import KeptLinear, kept_product, kept_weight
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.model.moe_layers import without_experts
from fdasync_transformers.parallel.plan import read_plan
from fdasync_transformers.parallel.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

    from fdasync_transformers.model.kv import LayerSpec
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.parallel.cuts import Cut
    from fdasync_transformers.parallel.plan import Plan


class Sharded:
    """A model; this process holds one rank's parts of it.

    Args:
        model: whole, on the meta device; its tensors are replaced.
        rank, ranks: of the group.
        latent: whether the latents of MLA layers are paged.
        further: attention outside a pass of the model, such as its multi-token prediction layers'.
        widths: numbers of ranks that are named where `ranks` does not fit the model, if they do.

    Attributes:
        plan: that it is cut by.
        cuts: by name of the model's tensor; others are whole.
        shares_blocks: every rank holds whole KV blocks, since its attention is whole.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rank: int,
        ranks: int,
        *,
        latent: bool,
        further: probe.Attention | None = None,
        widths: Sequence[int] = range(1, MOST_RANKS + 1),
    ) -> None:
        """Raises UnsupportedModel and ConfigError as `read_plan`, before anything is changed."""
        self._kind = str(model.config.model_type)
        self._rank, self._ranks, self._dtype = rank, ranks, model.dtype
        self._layers, names, queries = _attention_of(model, latent)
        if further is not None:
            self._layers, names, queries = (
                self._layers | further.layers,
                names | further.names,
                queries | further.queries,
            )
        by_name = {name: self._layers[index] for index, name in names.items()}
        try:
            self.plan = _plan(model, by_name, queries, rank, ranks)
        except ConfigError as error:
            works = [width for width in widths if _fits(model, by_name, queries, width)]
            raise ConfigError(error.field, error.problem, hint=works_with(works)) from error
        self.cuts: Mapping[str, Cut] = self.plan.cuts
        self.shares_blocks = not self.plan.heads
        self._cut(model)
        if self.plan.heads:
            self._set_groups(model, names, queries)

    @property
    def held_token_nbytes(self) -> int:
        """Bytes of a token's KV on this rank."""
        return self._layout(tuple(self._layers.values())).held_token_nbytes

    def layout(
        self, layers: Sequence[LayerSpec], make: Callable[[Sequence[LayerSpec]], KVLayout] | None = None
    ) -> KVLayout:
        """The layout of whole blocks, and this rank's part of them.

        Args:
            layers: as a probe of this rank's model finds them.
            make: the layout of the layers of a whole model, in which more may be stored than they; None: no more is.

        Raises UnsupportedModel where they are not the parts that were planned.
        """
        whole = tuple(replace(layer, kv_heads=self._layers[layer.index].kv_heads) for layer in layers)
        made = self._layout(whole if make is None else make(whole).layers)
        for found, spec in zip(layers, whole, strict=True):
            stored = made.stored_heads(spec)
            if found.kv_heads != stored.stop - stored.start:
                problem = f"a rank computes {found.kv_heads} KV heads of layer {spec.index}"
                raise UnsupportedModel(
                    self._kind, f"tensor parallel: {problem}, and stores {stored.stop - stored.start}"
                )
        return made

    def attach(self, model: PreTrainedModel, collectives: Collectives) -> Sums:
        """Sum partial outputs over the ranks in every forward pass from now on. Returns what is summed where."""
        for name in self.plan.rows:
            module: Any = model.get_submodule(name)
            if module.bias is not None:
                module.forward = _without_bias(module)
            module.register_forward_hook(_summing(collectives, name, with_bias=module.bias is not None))
        for name in self.plan.summed:
            model.get_submodule(name).register_forward_hook(_summing(collectives, name, with_bias=False))
        for name in self.plan.divided:
            model.get_submodule(name).register_forward_pre_hook(_dividing(collectives.ranks))
        return Sums(collectives, {model.get_submodule(name): name for name in (*self.plan.rows, *self.plan.summed)})

    def _layout(self, layers: tuple[LayerSpec, ...]) -> KVLayout:
        rank, ranks = (0, 1) if self.shares_blocks else (self._rank, self._ranks)
        return KVLayout(layers, self._dtype, rank, ranks)

    def _cut(self, model: PreTrainedModel) -> None:
        for name, cut in self.cuts.items():
            path, _, last = name.rpartition(".")
            module: Any = model.get_submodule(path)
            whole = module._parameters[last]
            shape = cut.shape(tuple(whole.shape))
            part = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            module._parameters[last] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
            if isinstance(module, torch.nn.Linear) and last == "weight":
                module.out_features, module.in_features = shape

    def _set_groups(self, model: PreTrainedModel, names: Mapping[int, str], queries: Mapping[int, int]) -> None:
        """Tell the attention modules how many of this rank's query heads share a KV head of it."""
        layout = self._layout(tuple(self._layers.values()))
        for layer in layout.layers:
            module: Any = model.get_submodule(names[layer.index])
            if not layer.latent_rank and hasattr(module, "num_key_value_groups"):
                stored = layout.stored_heads(layer)
                module.num_key_value_groups = queries[layer.index] // self._ranks // (stored.stop - stored.start)


def _plan(
    model: PreTrainedModel, layers: Mapping[str, LayerSpec], queries: Mapping[int, int], rank: int, ranks: int
) -> Plan:
    """As `read_plan`, of a model whose attention the library's own code can compute in parts.

    Args:
        layers: by the name of their module. queries: query heads by layer index.
    """
    kind = str(model.config.model_type)
    plan = read_plan(model, layers, rank, ranks, model.dtype)
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True).items())
    if both := sorted({name for pair in tied for name in pair} & plan.cuts.keys()):
        raise UnsupportedModel(kind, f"tensor parallel: {both[0]} is tied to another tensor, and cut")
    if not plan.heads:
        return plan
    layout = KVLayout(tuple(layers.values()), model.dtype, rank, ranks)
    for name, layer in layers.items():
        if queries[layer.index] % ranks:
            problem = f"{ranks} ranks cannot part the {queries[layer.index]} query heads of layer {layer.index}"
            raise ConfigError("tensor_parallel", problem)
        # a rank's queries would attend to some of the heads that it stores: the library's own attention cannot
        if layout.attended_heads(layer) != layout.stored_heads(layer):
            problem = f"tensor parallel: ranks share several KV heads of {name}: layers differ in their heads"
            raise UnsupportedModel(kind, problem)
    return plan


def _fits(model: PreTrainedModel, layers: Mapping[str, LayerSpec], queries: Mapping[int, int], ranks: int) -> bool:
    try:
        _plan(model, layers, queries, 0, ranks)
    except (ConfigError, UnsupportedModel):
        return False
    return True


def _attention_of(model: PreTrainedModel, latent: bool) -> probe.Attention:
    """The attention of a whole model on the meta device."""
    with families.mended(model), without_experts(model):
        layers = probe.attention_layers(model, latent=latent, query_scales={}, reaches=False)
        log = probe.run(model)
    names = {module: name for name, module in model.named_modules()}
    return probe.Attention(
        {layer.index: layer for layer in layers},
        {index: names[note[0]] for index, note in sorted(log.layers.items())},
        dict(log.query_heads),
    )


def _without_bias(module: Any) -> Any:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(module, KeptLinear):
            return kept_product(hidden, kept_weight(module), None, proven=module.proven)
        return linear(hidden, module.weight)

    return forward


def _summing(collectives: Collectives, name: str, *, with_bias: bool) -> Any:
    def after(module: Any, _args: object, output: torch.Tensor) -> torch.Tensor:
        total = collectives.all_reduce(output, name)
        # once, as one process adds it
        return total + module.bias if with_bias else total

    return after


def _dividing(ranks: int) -> Any:
    def before(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] / ranks, *args[1:])

    return before
