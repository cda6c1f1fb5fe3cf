"""Replaces RMSNorms of the library, which are eight small kernels, by one kernel.

Found by the class's name. How a class rounds is found by trying: its own forward, with a random weight, is compared
with the kernel in each rounding, on rows of usual, very small and very large size. Results may differ in the last
places alone, and of narrow dtypes rarely, since only the order of the mean's sum is ours. Called by `operations.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.layer.norm import KINDS, check, norm_unchecked

from fdasync_transformers.fused.modules import (
    OWN_FORWARD,
    Noise,
    check_kind,
    refuse_gradient,
    signature_of,
    steps_apart,
    takes_one,
    text_modules,
    twin_of,
)
from fdasync_transformers.fused.replacement import Differs, Operation, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_kernels.layer.norm import Rounding

    from fdasync_transformers.fused.replacement import Case

_NAME = "RMSNorm"
_EPSILONS = ("variance_epsilon", "eps")
_WEIGHTED: tuple[Rounding, ...] = ("normed", "product", "one_plus")
_BARE: tuple[Rounding, ...] = ("none", "scale")
_ROW_COUNTS = (1, 5, 24)
# of norms that do not say it
_SOME_COLUMNS = (64, 96)
# the product of a rounded value differs by two steps where the value differs by one; in float32 the mean itself may
# differ by a few
_MOST_STEPS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 8}
# a last place of float32 seldom crosses a boundary of a narrow dtype
_MOST_DIFFERING = {torch.bfloat16: 0.001, torch.float16: 0.004, torch.float32: 1.0}
# of rows: their squares stay within float32
_SIZES = {torch.bfloat16: (1e-12, 1e12), torch.float16: (1e-3, 1e2), torch.float32: (1e-12, 1e12)}


class Norms(Operation["Rounding"]):
    """RMSNorms, by the kernel's rounding. Replaced ones raise RunnerError where a gradient is asked for."""

    what, which = "norms", "norms of"

    def finds(self, model: Any) -> Iterator[Place]:
        for name, module in text_modules(model):
            kind = type(module).__name__
            if _NAME in kind:
                yield Place(name, module, kind, refusal=_refusal(module), key=signature_of(module))

    def candidates(self, place: Place) -> tuple[Rounding, ...]:
        return _BARE if place.module._parameters.get("weight") is None else _WEIGHTED

    def cases(self, place: Place) -> list[Case[Rounding]]:
        noise, dtype = Noise(self.device), self.dtype
        twin: Any = place.module
        weight = twin._parameters.get("weight")
        columns: tuple[int, ...] = _SOME_COLUMNS
        if weight is not None:
            values = noise.normal(*weight.shape, dtype=weight.dtype)
            twin = twin_of(twin, {"weight": torch.nn.Parameter(values, requires_grad=False)})
            columns = tuple(weight.shape)
        scale = torch.tensor([1.0, *_SIZES[dtype]]).repeat(_ROW_COUNTS[-1] // 3)[:, None]
        rows = [noise.normal(max(_ROW_COUNTS), width, dtype=dtype, scale=scale) for width in columns]
        return [partial(self._compare, twin, each[None, :count]) for each in rows for count in _ROW_COUNTS]

    def _compare(self, twin: Any, rows: torch.Tensor, rounding: Rounding) -> None:
        fused = _fused(twin, rounding, self.dtype)
        library = type(twin).forward(twin, rows)
        ours = fused(rows)
        check_kind(ours, library)
        steps = steps_apart(ours, library)
        # chance alone makes one or two of few values differ
        many = int((steps > 0).sum()) > max(2.0, _MOST_DIFFERING[self.dtype] * steps.numel())
        if int(steps.max()) > _MOST_STEPS[self.dtype] or many:
            raise Differs("it computes something else than the norms known here")

    def put(self, place: Place, candidate: Rounding) -> None:
        place.module.forward = _fused(place.module, candidate, self.dtype)


def _refusal(module: torch.nn.Module) -> str:
    if "forward" in vars(module):
        return OWN_FORWARD
    if list(module.children()):
        return "it has parts"
    if not takes_one(module):
        return "it takes more than rows"
    parameters = dict(module.named_parameters())
    if set(parameters) - {"weight"} or any(each.dim() != 1 for each in parameters.values()):
        return f"it has {', '.join(parameters)}"
    return "" if epsilon(module) is not None else "it does not say what is added to the mean"


def epsilon(module: torch.nn.Module) -> float | None:
    """What a norm adds to the mean of the squares, if it says so."""
    values = [value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)]
    return values[0] if values else None


def _fused(module: torch.nn.Module, rounding: Rounding, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    parameters = module._parameters
    kind = KINDS[rounding]
    eps = epsilon(module) or 0.0
    library: Callable[..., torch.Tensor] = type(module).forward
    weight = parameters.get("weight")
    if weight is not None:
        check(weight.new_empty((1, *weight.shape), dtype=dtype), weight, rounding)

    def forward(rows: torch.Tensor, /) -> torch.Tensor:
        # looked up in each call: an update may put another parameter there
        weight: Any = parameters["weight"]
        if rows.dtype is not dtype:
            return library(module, rows)
        if torch.is_grad_enabled():
            refuse_gradient(rows, weight)
        return norm_unchecked(rows, weight, eps, kind)

    def bare(rows: torch.Tensor, /) -> torch.Tensor:
        if rows.dtype is not dtype:
            return library(module, rows)
        if torch.is_grad_enabled():
            refuse_gradient(rows)
        return norm_unchecked(rows, None, eps, kind)

    return bare if weight is None else forward
