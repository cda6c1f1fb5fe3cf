"""Replaces the activation and the product of gated dense layers, shared experts too, by one kernel between the linears.

Found by the names of their linears. The library's own forward is run with stand-ins for the linears, which hand it
every gate there is in a narrow dtype, and must give what the kernel gives; then whole layers are compared. Called by
`operations.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fdasync_kernels.layer.gate import KINDS, gated_unchecked

from fdasync_transformers.fused.proofs import alone, guarded
from fdasync_transformers.fused.replaced import (
    Noise,
    Replaced,
    refuse_gradient,
    shape_difference,
    signature_of,
    takes_one,
    text_modules,
    twin_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fdasync_transformers.fused.proofs import Agree

    Forward = Callable[[torch.Tensor], torch.Tensor]

_ROW_COUNTS = (1, 5)
_WIDTH = 1024
# where the kernels are interpreted, whose exponentials are numpy's
_MOST_DIFFERING = 0.01
# of gates in float32, where not all can be tried; cubes of the largest stay within it
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40


class _Linears(NamedTuple):
    """Names of a layer's linears; `up` is "" where the gate's linear has both, the gate first."""

    gate: str
    up: str
    down: str


class _Activation(NamedTuple):
    """The kernel's activation: the number of its kind, and whether its result is left unrounded."""

    kind: int
    wide: bool


_ACTIVATIONS = tuple(_Activation(kind, wide) for wide in (False, True) for kind in KINDS.values())
_LAYOUTS = (
    _Linears("gate_proj", "up_proj", "down_proj"),
    _Linears("w1", "w3", "w2"),
    _Linears("gate_up_proj", "", "down_proj"),
    _Linears("input_linear", "", "output_linear"),
)


class _Given(torch.nn.Module):
    """Stands for a linear: takes one input and gives a value prepared for it."""

    def __init__(self, given: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__()
        self._pair = (given, value)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        given, value = self._pair
        if rows is not given:
            raise RuntimeError("its linears are handed something else than its input")
        return value


def fuse_dense(model: torch.nn.Module, dtype: torch.dtype, device: torch.device, agree: Agree = alone) -> Replaced:
    """Replace the forwards of gated dense layers whose results the kernel keeps, in place; waits for the device.

    The linears stay the library's, and are called as before. On a device results are equal to the last bit; where the
    kernels are interpreted they may differ in the last places, as exponentials are numpy's there.

    Args:
        model: in inference.
        dtype: of the activations.
        device: of the weights.
        agree: what the ranks of a group make of a reason to keep a layer; each of them proves its parts.

    Returns:
        The replaced modules. They raise RunnerError where a gradient is asked for.
    """
    replaced = Replaced()
    proofs: dict[Hashable, tuple[_Activation | None, str]] = {}
    for name, module in text_modules(model):
        linears = _linears_of(module)
        if linears is None:
            continue
        kind = type(module).__name__
        if "forward" in vars(module):
            replaced.leave(kind, "it has a forward of its own already")
            continue
        if not takes_one(module):
            replaced.leave(kind, "it takes more than rows")
            continue
        key = signature_of(module)
        if key not in proofs:
            proven, why = guarded(partial(_prove, module, linears, dtype, device), lambda reason: (None, reason))
            problem = agree(why)
            proofs[key] = (None, problem) if problem else (proven, "")
        activation, reason = proofs[key]
        if activation is None:
            replaced.leave(kind, reason)
        else:
            replaced.put(name, module, _fused(module, linears, activation))
    return replaced


def _linears_of(module: torch.nn.Module) -> _Linears | None:
    for names in _LAYOUTS:
        parts = [module._modules.get(name) for name in names if name]
        # stacked experts keep matrices, not linears
        if all(part is not None and getattr(part, "in_features", 0) for part in parts):
            return names
    return None


@torch.inference_mode()
def _prove(
    module: torch.nn.Module, linears: _Linears, dtype: torch.dtype, device: torch.device
) -> tuple[_Activation | None, str]:
    gate, up = _gates(dtype, device)
    rows = Noise(device).normal(1, 1, dtype=dtype)
    both = torch.cat([gate, up], dim=-1)
    given = {linears.gate: _Given(rows, gate if linears.up else both)}
    if linears.up:
        given[linears.up] = _Given(rows, up)
    twin: Any = twin_of(module, submodules={**given, linears.down: torch.nn.Identity()})
    try:
        library = type(module).forward(twin, rows)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise errors of many types
        return None, f"it does more than gate: {error}"
    reason = ""
    for activation in _ACTIVATIONS:
        # the twin's halves are taken as the fused forward takes them
        ours = _fused(twin, linears, activation)(rows)
        difference = shape_difference(ours, library)
        if not difference and not _alike(ours, library, gate, up):
            difference = "it is no product of an activation known here: " + ", ".join(KINDS)
        if not difference:
            problem = _whole_difference(module, _fused(module, linears, activation), dtype, device)
            return (None, problem) if problem else (activation, "")
        reason = reason or difference
    return None, reason


def _gates(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups [1, n, width]: all gates of a narrow dtype between the bounds, many of float32."""
    noise = Noise(device)
    if dtype is torch.float32:
        spread = torch.exp2(torch.linspace(-40.0, 40.0, 1 << 14)).repeat(4)
        gate = noise.normal(1 << 16, dtype=dtype, scale=spread)
    else:
        gate = torch.arange(1 << 16, device=device).to(torch.int16).view(dtype)
        gate = gate[gate.isfinite()]
    gate = gate[(gate.abs() >= _SMALLEST) & (gate.abs() <= _LARGEST)]
    gate = gate[: len(gate) // _WIDTH * _WIDTH].view(1, -1, _WIDTH)
    # away from 0, so that no product is below the normal range
    up = 0.5 + noise.normal(*gate.shape, dtype=torch.float32).abs()
    return gate, up.to(dtype)


def _alike(ours: torch.Tensor, library: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> bool:
    if ours.is_cuda:
        return bool(torch.equal(ours, library))
    # a last place of float32 seldom crosses a boundary of a narrow dtype
    if ours.dtype is not torch.float32 and int((ours != library).sum()) > _MOST_DIFFERING * ours.numel():
        return False
    eps = torch.finfo(ours.dtype).eps
    # functions that are sums with 1 lose what is below the last place of 1
    slack = (gate.float() * up.float()).abs() * 2**-22
    return bool(((ours.float() - library.float()).abs() <= 2 * eps * library.float().abs() + slack).all())


def _whole_difference(module: Any, fused: Forward, dtype: torch.dtype, device: torch.device) -> str:
    noise = Noise(device)
    first = next(part for part in module.children() if getattr(part, "in_features", 0))
    for count in _ROW_COUNTS:
        rows = noise.normal(1, count, int(first.in_features), dtype=dtype)
        library, ours = module.forward(rows), fused(rows)
        difference = shape_difference(ours, library)
        if difference:
            return difference
        near = 64 * torch.finfo(dtype).eps * float(library.float().abs().max())
        same = torch.equal(ours, library) if ours.is_cuda else torch.allclose(ours.float(), library.float(), atol=near)
        if not same:
            return "whole layers differ"
    return ""


def _fused(module: torch.nn.Module, linears: _Linears, activation: _Activation) -> Forward:
    parts: dict[str, Any] = module._modules
    gate_name, up_name, down_name = linears
    kind, wide = activation

    def forward(rows: torch.Tensor, /) -> torch.Tensor:
        gate = parts[gate_name](rows)
        up = parts[up_name](rows)
        if torch.is_grad_enabled():
            refuse_gradient(gate, up)
        result: torch.Tensor = parts[down_name](gated_unchecked(gate, up, kind, wide))
        return result

    def halves(rows: torch.Tensor, /) -> torch.Tensor:
        gate, up = parts[gate_name](rows).chunk(2, dim=-1)
        if torch.is_grad_enabled():
            refuse_gradient(gate)
        result: torch.Tensor = parts[down_name](gated_unchecked(gate, up, kind, wide))
        return result

    return forward if up_name else halves
