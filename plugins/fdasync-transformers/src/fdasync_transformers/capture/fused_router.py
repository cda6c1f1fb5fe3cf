"""Replaces routers of the library by one kernel that also records the chosen experts.

Only routers whose forward is exactly a linear, a float32 softmax, a top-k and perhaps a renormalisation. Each is
compared with the library's own before it is replaced; if one differs, the model keeps its routers. The linear stays the
library's, with the module's own weight, so new weights need no change here. Fused routers have no gradient, and
`forced_routing` (replay) does not see inside them: undo first. Knows no steps. Called by `routing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from fdasync.errors import BadInput, RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from fdasync.gpu.capture import CaptureBuffer
    from fdasync_transformers.model.moe_layers import MoELayers

    Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# found by reading the library's source; they renormalise by `norm_topk_prob` where a router has it, else always
_KNOWN = frozenset(
    {
        "FlexOlmoTopKRouter",
        "MellumTopKRouter",
        "MiniMaxTopKRouter",
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
        "Qwen3VLMoeTextTopKRouter",
        "Qwen3_5MoeTopKRouter",
    }
)
_CHECK_ROWS = 64


@dataclass
class FusedRouters:
    """Routers that were replaced.

    Attributes:
        rows: layer rows whose router is fused, rising: these routers record their own routing.
        notes: for people: why other routers are not fused.
    """

    rows: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    _replaced: list[tuple[torch.nn.Module, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Give every router its own forward back; may be called twice."""
        for module, before in self._replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._replaced.clear()
        self.rows = ()


def fuse_routers(
    model: PreTrainedModel,
    moe_layers: MoELayers,
    capture: CaptureBuffer | None = None,
    positions: Callable[[], torch.Tensor] | None = None,
) -> FusedRouters:
    """Replace the routers of a model's MoE layers by the fused one, in place.

    A fused router returns (logits, weights, ids) of the same shapes and dtypes as the library's. Runs each router twice
    on 64 random rows and compares, so it waits for the device: for start-up. Layers with a router of no known kind keep
    it; if a router of a known kind chooses other experts than the library's, no layer is fused.

    Args:
        model: in inference; its routers' weights are on one device and have their final dtype.
        moe_layers: of the model.
        capture: gets each fused layer's ids as it routes, in the layer's row; None: no recording.
        positions: gives the [T] int64 positions of the pass's tokens; called in each layer where `capture.debug`.

    Returns:
        The fused layer rows, and notes of the others. `undo` restores all routers.

    Raises:
        BadInput: `capture` is in debug, without `positions`.
    """
    if capture is not None and capture.debug and positions is None:
        raise BadInput("positions", "a capture buffer in debug needs the positions of the tokens")
    try:
        from fdasync.gpu.kernels import router as kernels
    except ModuleNotFoundError as error:
        return FusedRouters(notes=(f"routers are the library's own: no module {error.name}",))
    rows: list[int] = []
    notes: list[str] = []
    found: list[tuple[torch.nn.Module, Forward]] = []
    for row, (name, k) in enumerate(zip(moe_layers.names, moe_layers.top_k, strict=True)):
        module = _router_beside(model, name)
        problem = _unknown(module, k)
        if not problem and not kernels.runs_on(module.weight.device):
            return FusedRouters(notes=(f"routers are the library's own: no kernels on {module.weight.device}",))
        if problem:
            notes.append(f"router of layer {moe_layers.ids[row]} is the library's own: {problem}")
            continue
        difference = _difference(module, k, kernels.route)
        if difference:
            return FusedRouters(notes=(f"routers are the library's own: layer {moe_layers.ids[row]} {difference}",))
        rows.append(row)
        found.append((module, _fused(module, k, kernels.route, _weights_dtype(module), capture, row, positions)))
    replaced: list[tuple[torch.nn.Module, Any]] = []
    for module, forward in found:
        replaced.append((module, module.__dict__.get("forward")))
        module.forward = forward
    return FusedRouters(tuple(rows), tuple(notes), replaced)


def _router_beside(model: PreTrainedModel, experts: str) -> Any:
    block = model.get_submodule(experts.rpartition(".")[0])
    return getattr(block, "gate", None) or getattr(block, "router", None)


def _unknown(module: Any, k: int) -> str:
    kind = type(module).__name__
    if kind not in _KNOWN:
        return f"{kind} is of no known kind"
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or module.weight.dim() != 2 or module.top_k != k:
        return f"{kind} is not built as it was"
    if module.weight.shape[0] > 1024:
        return f"{module.weight.shape[0]} experts are more than the kernel takes"
    return ""


def _renormalises(module: Any) -> bool:
    return bool(getattr(module, "norm_topk_prob", True))


def _weights_dtype(module: Any) -> torch.dtype:
    """The dtype of the weights of the library's own router, from a run on one row."""
    with torch.inference_mode():
        weights: torch.Tensor = module.forward(module.weight.new_zeros((1, module.weight.shape[1])))[1]
    return weights.dtype


def _fused(
    module: Any,
    k: int,
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    weights_dtype: torch.dtype,
    capture: CaptureBuffer | None,
    row: int,
    positions: Callable[[], torch.Tensor] | None,
) -> Forward:
    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden_states.reshape(-1, module.weight.shape[1]), module.weight)
        if logits.requires_grad:
            raise RunnerError("a fused router has no gradient: undo it before training")
        place = None
        if capture is not None and not capture.debug:
            place = capture.claim(row, len(logits), k)
        weights, ids = route(logits, k, renormalise=_renormalises(module), weights_dtype=weights_dtype, capture=place)
        if capture is not None and capture.debug:
            capture.put(ids, row, k, None if positions is None else positions())
        return logits, weights, ids

    return forward


@torch.inference_mode()
def _difference(module: Any, k: int, route: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> str:
    """How the fused router differs from the module's own forward on random rows; "" if it does not."""
    weight: torch.Tensor = module.weight
    # a generator of its own leaves the global random state alone
    noise = torch.randn((_CHECK_ROWS, weight.shape[1]), generator=torch.Generator().manual_seed(0))
    hidden = noise.to(weight.device, weight.dtype)
    answer = module.forward(hidden)
    if not isinstance(answer, tuple) or len(answer) != 3:
        return "returns something else than logits, weights and ids"
    logits, weights, ids = answer
    ours = _fused(module, k, route, weights.dtype, None, 0, None)(hidden)
    for name, mine, library in zip(("logits", "weights", "ids"), ours, answer, strict=True):
        if mine.shape != library.shape or mine.dtype != library.dtype:
            return f"returns {name} {library.dtype} {tuple(library.shape)}, not {mine.dtype} {tuple(mine.shape)}"
    if not torch.equal(ours[0], logits):
        return "makes other logits than its linear does"
    # both are in falling order, so equal scores slot by slot mean equal experts, but for ties
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if not torch.equal(scores.gather(1, ours[2]), scores.gather(1, ids)):
        return "chooses other experts"
    if not torch.allclose(ours[1].float(), weights.float(), rtol=2 * torch.finfo(weights.dtype).eps + 1e-5, atol=0.0):
        return "gives its experts other weights"
    return ""
