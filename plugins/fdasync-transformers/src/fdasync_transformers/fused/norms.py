"""Replaces RMSNorms of the library, which are eight small kernels, by one kernel.

Found by the class's name. How a class rounds is found by trying: its own forward, with a random weight, is compared
with the kernel in each rounding, on rows of usual, very small and very large size. Results may differ in the last
places alone, and of narrow dtypes rarely, since only the order of the mean's sum is ours. Called by `operations.py`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fdasync_kernels.layer.norm import KINDS, check, norm_unchecked

from fdasync.errors import BadInput
from fdasync_transformers.fused.proofs import guarded
from fdasync_transformers.fused.replaced import (
    Noise,
    Replaced,
    refuse_gradient,
    shape_difference,
    signature_of,
    steps_apart,
    takes_one,
    text_modules,
    twin_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fdasync_kernels.layer.norm import Rounding

_NAME = re.compile(r"RMSNorm")
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


class _Proof(NamedTuple):
    rounding: Rounding | None
    reason: str


def fuse_norms(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Replaced:
    """Replace the RMSNorms of a model that the kernel computes as they do, in place; waits for the device.

    Args:
        model: in inference; weights have their final dtype.
        dtype: of the rows that are fused; rows of others go the library's way.
        device: of the weights; kernels run there.

    Returns:
        The replaced modules. They raise RunnerError where a gradient is asked for.
    """
    replaced = Replaced()
    proofs: dict[Hashable, _Proof] = {}
    for name, module in text_modules(model):
        kind = type(module).__name__
        if not _NAME.search(kind):
            continue
        problem = _unknown(module)
        if problem:
            replaced.leave(kind, problem)
            continue
        key = signature_of(module)
        if key not in proofs:
            proofs[key] = guarded(partial(_prove, module, dtype, device), lambda reason: _Proof(None, reason))
        rounding, reason = proofs[key]
        if rounding is None:
            replaced.leave(kind, reason)
        else:
            replaced.put(name, module, _fused(module, rounding, dtype))
    return replaced


def _unknown(module: torch.nn.Module) -> str:
    """Why a module is not even tried; "" if it is."""
    if "forward" in vars(module):
        return "it has a forward of its own already"
    if list(module.children()):
        return "it has parts"
    if not takes_one(module):
        return "it takes more than rows"
    parameters = dict(module.named_parameters())
    if set(parameters) - {"weight"} or any(each.dim() != 1 for each in parameters.values()):
        return f"it has {', '.join(parameters)}"
    if epsilon(module) is None:
        return "it does not say what is added to the mean"
    return ""


def epsilon(module: torch.nn.Module) -> float | None:
    """What a norm adds to the mean of the squares, if it says so."""
    values = [value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)]
    return values[0] if values else None


@torch.inference_mode()
def _prove(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> _Proof:
    noise = Noise(device)
    weight = module._parameters.get("weight")
    twin: Any = module
    if weight is not None:
        values = noise.normal(*weight.shape, dtype=weight.dtype)
        twin = twin_of(module, {"weight": torch.nn.Parameter(values, requires_grad=False)})
    low, high = _SIZES[dtype]
    scale = torch.tensor([1.0, low, high]).repeat(_ROW_COUNTS[-1] // 3)[:, None]
    reason = ""
    rounds = _BARE if weight is None else _WEIGHTED
    columns = _SOME_COLUMNS if weight is None else weight.shape
    rows = [noise.normal(max(_ROW_COUNTS), width, dtype=dtype, scale=scale) for width in columns]
    for rounding in rounds:
        try:
            fused = _fused(twin, rounding, dtype)
        except BadInput as error:
            reason = reason or str(error)
            continue
        reasons = (_difference(twin, fused, each[None, :count], dtype) for each in rows for count in _ROW_COUNTS)
        failed = next(filter(None, reasons), "")
        if not failed:
            return _Proof(rounding, "")
        reason = reason or failed
    return _Proof(None, reason)


def _difference(module: Any, fused: Callable[..., torch.Tensor], rows: torch.Tensor, dtype: torch.dtype) -> str:
    try:
        library = type(module).forward(module, rows)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise errors of many types
        return f"it does not norm plain rows: {error}"
    ours = fused(rows)
    kind = shape_difference(ours, library)
    if kind:
        return kind
    steps = steps_apart(ours, library)
    # chance alone makes one or two of few values differ
    many = int((steps > 0).sum()) > max(2.0, _MOST_DIFFERING[dtype] * steps.numel())
    if int(steps.max()) > _MOST_STEPS[dtype] or many:
        return "it computes something else than the norms known here"
    return ""


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
