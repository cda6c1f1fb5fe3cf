"""Runs the forward of a router of the library, looks at its linear and its selections, and may replace its logits.

Knows torch functions by name, and no kinds of routers. Called by `router_proof.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    import torch

    from fdasync_transformers.fused.router_kinds import RouterKind


class Watch(TorchFunctionMode):
    """Records the linear and the selections of a forward; gives the linear a result of ours if there is one.

    Attributes:
        logits: the result of the linear, converted to its dtype; None: it computes.
        linears: input, weight and bias of each linear that ran.
        compared: what each `topk` compared.
    """

    def __init__(self, logits: torch.Tensor | None) -> None:
        super().__init__()
        self.logits = logits
        self.linears: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self.compared: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("linear", "mm"):
            factor = args[1].t() if name == "mm" else args[1]
            self.linears.append((args[0], factor, args[2] if len(args) > 2 else kwargs.get("bias")))
            if self.logits is not None:
                return self.logits.to(kwargs.get("out_dtype") or args[0].dtype).reshape(*args[0].shape[:-1], -1)
        elif name == "topk":
            self.compared.append((args[0] if args else kwargs["input"]).detach().clone())
        return func(*args, **kwargs)


def run_watched(
    module: Any, kind: RouterKind, hidden: torch.Tensor, bias: torch.Tensor | None, logits: torch.Tensor | None
) -> tuple[Watch, Any]:
    """Run a router's own forward on hidden states [T, H]; `bias`: of the selection, where it is an argument."""
    arguments = (bias,) if kind.bias_argument else ()
    with Watch(logits) as watch:
        answer = module.forward(hidden[None] if kind.batched else hidden, *arguments)
    return watch, answer
