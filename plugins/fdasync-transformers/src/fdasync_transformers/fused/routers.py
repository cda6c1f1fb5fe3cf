"""Replaces routers of the library by two kernels, which also record the chosen experts: the product, and the choice.

A token's logits, ids and weights do not depend on how many tokens run beside it. Each router is held against its own
forward before it is replaced (`router_proof.py`); a router that differs, or is of no known kind (`known.py`),
stays the library's. The kernels read the module's own tensors, so new weights need no change here. Fused routers have
no gradient, and replay refuses models that have them. Knows no steps. Called once for a model by `start/fuse.py`; a
capture attaches to the result later (`capture/routing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.limits import FLOATS, MOST_EXPERTS
from fdasync_kernels.router import product

from fdasync.errors import BadInput, InvariantBroken
from fdasync_transformers.fused.known import kind_of
from fdasync_transformers.fused.modules import past_modes, refuse_gradient
from fdasync_transformers.fused.replacement import Differs, Place, Replaced, Replacement, prove, replace
from fdasync_transformers.fused.router_kinds import RouterKind, part_of
from fdasync_transformers.fused.router_proof import RouterForm, check_choice, learn_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from fdasync.gpu.capture import CaptureBuffer
    from fdasync_transformers.fused.replacement import Case
    from fdasync_transformers.model.moe_layers import MoELayers

    Forward = Callable[..., tuple[torch.Tensor, ...]]


@dataclass
class Record:
    """Where the fused routers of a model record; they read it in each pass."""

    capture: CaptureBuffer | None = None
    positions: Callable[[], torch.Tensor] | None = None


@dataclass
class FusedRouters(Replaced):
    """Routers that were replaced. They record nothing until a capture attaches."""

    _record: Record = field(default_factory=Record)

    @property
    def rows(self) -> tuple[int, ...]:
        """Layer rows whose router is fused, rising: these routers record their own routing."""
        return tuple(map(int, self.names))

    def attach(self, capture: CaptureBuffer, positions: Callable[[], torch.Tensor] | None = None) -> None:
        """Record from the next pass on. A graph that is captured before keeps recording nothing.

        Args:
            capture: gets each fused layer's ids as it routes, in the layer's row.
            positions: gives the [T] int64 positions of the pass's tokens; called in each layer where `capture.debug`.

        Raises:
            BadInput: `capture` is in debug, without `positions`.
            InvariantBroken: another capture is attached.
        """
        if capture.debug and positions is None:
            raise BadInput("positions", "a capture buffer in debug needs the positions of the tokens")
        if self._record.capture is not None:
            raise InvariantBroken("fused routers record for one capture at a time")
        self._record.capture, self._record.positions = capture, positions

    def detach(self) -> None:
        """Record nothing from the next pass on; may be called twice."""
        self._record.capture = self._record.positions = None


class Routers(Replacement[RouterForm]):
    """The routers of MoE layers, by what they return. A replaced one returns what the library's does: the same parts in
    the same order, of the same shapes and dtypes. Its ids are the very tensor that the experts read.

    Args:
        dtype: of the hidden states.
        record: where they record.
        layers: of the model.
    """

    what, which = "routers", "routers of layers"

    def __init__(self, dtype: torch.dtype, record: Record, layers: MoELayers | None = None) -> None:
        self._dtype = dtype
        self._record = record
        self._layers = layers

    def finds(self, model: Any) -> Iterator[Place]:
        layers = self._layers
        if layers is None:
            return
        for row, (name, number, k) in enumerate(zip(layers.names, layers.ids, layers.top_k, strict=True)):
            block = model.get_submodule(name.rpartition(".")[0])
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            yield self.place(router, k, row, str(number))

    def place(self, module: Any, k: int, row: int = 0, number: str = "") -> Place:
        """The place of one router; `k`: experts of a token; `row`: where it records."""
        kind = kind_of(module)
        refusal = _refusal(module, kind, self._dtype)
        return Place(f"{row}", module, number, type(module).__name__, refusal, given=(kind, k, row))

    def candidates(self, place: Place) -> Iterator[RouterForm]:
        kind, k, _ = place.given
        yield learn_form(place.module, kind, k, self._dtype, product.router_logits)

    def cases(self, place: Place) -> list[Case[RouterForm]]:
        kind, k, _ = place.given
        return [partial(check_choice, place.module, kind, k, self._dtype, choose)]

    def put(self, place: Place, candidate: RouterForm) -> None:
        place.module.forward = self.forward(place, candidate)

    def forward(self, place: Place, form: RouterForm) -> Forward:
        """The forward by kernels, not put in place."""
        kind, k, row = place.given
        return make_forward(place.module, kind, form, k, self._record, row)


def fuse_routers(model: PreTrainedModel, moe_layers: MoELayers) -> FusedRouters:
    """Replace the routers of a model's MoE layers by fused ones, in place.

    See `replace`. Biases of the selection are changed meanwhile, and put back.
    """
    record = Record()
    return FusedRouters(**vars(replace(Routers(model.dtype, record, moe_layers), model)), _record=record)


def fused_router(module: Any, k: int, dtype: torch.dtype, record: Record) -> Forward | Differs:
    """The proven forward of one router by kernels, not put in place; or why there is none. See `Routers`."""
    routers = Routers(dtype, record)
    place = routers.place(module, k)
    form = prove(routers, place)
    return form if isinstance(form, Differs) else routers.forward(place, form)


def _refusal(module: Any, kind: RouterKind | str, dtype: torch.dtype) -> str:
    if isinstance(kind, str):
        return kind
    try:
        weight = part_of(module, kind.weight)
    except AttributeError as error:
        return f"is not built as it was: {error}"
    if weight.dim() != 2 or weight.dtype not in FLOATS or dtype not in FLOATS:
        return f"has a weight {weight.dtype} {tuple(weight.shape)}"
    return f"has {len(weight)} experts, more than the kernel takes" if len(weight) > MOST_EXPERTS else ""


def choose(
    kind: RouterKind,
    logits: torch.Tensor,
    k: int,
    weights_dtype: torch.dtype,
    bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    capture: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids by a kind, in one launch."""
    from fdasync_kernels.router.in_turn import route_in_turn
    from fdasync_kernels.router.route import route

    if kind.near is not None:
        return route_in_turn(logits, k, kind.near, capture)
    return route(
        logits, k, kind.rule, weights_dtype=weights_dtype, bias=bias, expert_scale=expert_scale, capture=capture
    )


def make_forward(module: Any, kind: RouterKind, form: RouterForm, k: int, record: Record, row: int) -> Forward:
    """A router's forward by kernels, unproven, which records in its layer row."""
    router_logits = product.router_logits

    def forward(hidden_states: torch.Tensor, selection_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        weight = part_of(module, kind.weight)
        hidden = hidden_states.reshape(-1, weight.shape[1])
        if torch.is_grad_enabled():
            refuse_gradient(hidden, selection_bias, *module.parameters())
        if kind.prepare is not None:
            hidden = kind.prepare(module, hidden)
        linear_bias = part_of(module, kind.bias) if kind.bias else None
        bias = part_of(module, kind.selection_bias) if kind.selection_bias else selection_bias
        scale = part_of(module, kind.expert_scale) if kind.expert_scale else None
        capture, positions = record.capture, record.positions
        # kernels alone
        with past_modes():
            logits = router_logits(hidden, weight, linear_bias, rounded=form.rounded, dtype=form.logits_dtype)
            place = None
            if capture is not None and not capture.debug:
                place = capture.claim(row, len(logits), k)
            weights, ids = choose(kind, logits, k, form.weights_dtype, bias, scale, place)
        if capture is not None and capture.debug:
            capture.put(ids, row, k, None if positions is None else positions())
        returned = logits.softmax(-1, torch.float32) if kind.probabilities and "logits" in form.order else logits
        parts = {"logits": returned, "weights": weights, "ids": ids}
        return tuple(parts[name] for name in form.order)

    return forward
