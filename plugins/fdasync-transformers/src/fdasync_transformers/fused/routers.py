"""Replaces routers of the library by two kernels, which also record the chosen experts: the product, and the choice.

A token's logits, ids and weights do not depend on how many tokens run beside it. Each router is proven against its own
forward before it is replaced (`router_proof.py`); a router that differs, or is of no known kind (`router_kinds.py`),
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

from fdasync.errors import BadInput, InvariantBroken
from fdasync_transformers.fused.proofs import guarded
from fdasync_transformers.fused.replaced import past_modes, refuse_gradient
from fdasync_transformers.fused.router_kinds import RouterKind, kind_of, part_of
from fdasync_transformers.fused.router_proof import Differs, RouterForm, prove

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from fdasync.gpu.capture import CaptureBuffer
    from fdasync_transformers.model.moe_layers import MoELayers

    Forward = Callable[..., tuple[torch.Tensor, ...]]


@dataclass
class Record:
    """Where the fused routers of a model record; they read it in each pass."""

    capture: CaptureBuffer | None = None
    positions: Callable[[], torch.Tensor] | None = None


@dataclass
class FusedRouters:
    """Routers that were replaced. They record nothing until a capture attaches.

    Attributes:
        rows: layer rows whose router is fused, rising: these routers record their own routing.
        notes: for people: why other routers are not fused, once for each reason.
    """

    rows: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    _record: Record = field(default_factory=Record)

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


def fuse_routers(model: PreTrainedModel, moe_layers: MoELayers) -> FusedRouters:
    """Replace the routers of a model's MoE layers by fused ones, in place.

    A fused router returns what the library's does: the same parts in the same order, of the same shapes and dtypes. Its
    ids are the very tensor that the experts read. Runs each router several times on made-up rows, with biases of the
    selection that are put back, and compares; so it waits for the device: for start-up.

    Args:
        model: in inference; its routers' weights are on one device and have their final dtype.
        moe_layers: of the model.

    Returns:
        The fused layer rows, and notes of the others.
    """
    try:
        from fdasync_kernels.chip import runs_on
    except ModuleNotFoundError as error:
        return FusedRouters(notes=(f"routers are the library's own: no module {error.name}",))
    if not runs_on(model.device):
        return FusedRouters(notes=(f"routers are the library's own: no kernels on {model.device}",))
    rows: list[int] = []
    reasons: dict[str, list[int]] = {}
    record = Record()
    for row, (name, k) in enumerate(zip(moe_layers.names, moe_layers.top_k, strict=True)):
        module = _router_beside(model, name)
        forward = fused_router(module, k, model.dtype, record, row)
        if isinstance(forward, str):
            reasons.setdefault(f"{type(module).__name__} {forward}", []).append(moe_layers.ids[row])
            continue
        rows.append(row)
        module.forward = forward
    notes = [f"routers of layers {_listed(layers)} are the library's own: {why}" for why, layers in reasons.items()]
    return FusedRouters(tuple(rows), tuple(notes), record)


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def _router_beside(model: PreTrainedModel, experts: str) -> Any:
    block = model.get_submodule(experts.rpartition(".")[0])
    return getattr(block, "gate", None) or getattr(block, "router", None)


def fused_router(module: Any, k: int, dtype: torch.dtype, record: Record, row: int = 0) -> Forward | str:
    """The proven forward of one router by kernels, not put in place; or for people why there is none.

    See `fuse_routers`. `k`: experts of a token; `dtype`: of the hidden states; `record`: where it records `row`.
    """
    return guarded(partial(_fused_or_reason, module, k, dtype, record, row), str)


def _fused_or_reason(*args: Any) -> Forward | str:
    try:
        return _fused(*args)
    except Differs as difference:
        return str(difference)


def _fused(module: Any, k: int, dtype: torch.dtype, record: Record, row: int) -> Forward:
    """The forward that replaces a router's; raises Differs where there is none."""
    from fdasync_kernels.router.product import router_logits

    kind = kind_of(module)
    if isinstance(kind, str):
        raise Differs(kind)
    weight = part_of(module, kind.weight)
    if weight.dim() != 2 or weight.dtype not in FLOATS or dtype not in FLOATS:
        raise Differs(f"has a weight {weight.dtype} {tuple(weight.shape)}")
    if len(weight) > MOST_EXPERTS:
        raise Differs(f"has {len(weight)} experts, more than the kernel takes")
    form = prove(module, kind, k, dtype, router_logits, choose)
    return make_forward(module, kind, form, k, record, row)


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
    from fdasync_kernels.router.product import router_logits

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
