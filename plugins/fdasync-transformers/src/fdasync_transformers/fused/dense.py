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

from fdasync_transformers.fused.modules import (
    OWN_FORWARD,
    Noise,
    check_kind,
    refuse_gradient,
    signature_of,
    takes_one,
    text_modules,
    twin_of,
)
from fdasync_transformers.fused.replacement import Differs, Operation, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_transformers.fused.replacement import Case

    Forward = Callable[[torch.Tensor], torch.Tensor]

_ROW_COUNTS = (1, 5)
_WIDTH = 1024
# where the kernels are interpreted, whose exponentials are numpy's
_MOST_DIFFERING = 0.01
# of gates in float32, where not all can be tried; cubes of the largest stay within it
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40


class Linears(NamedTuple):
    """Names of a layer's linears; `up` is "" where the gate's linear has both, the gate first."""

    gate: str
    up: str
    down: str


class Activation(NamedTuple):
    """The kernel's activation: the number of its kind, and whether its result is left unrounded."""

    kind: int
    wide: bool


_ACTIVATIONS = tuple(Activation(kind, wide) for wide in (False, True) for kind in KINDS.values())
_LAYOUTS = (
    Linears("gate_proj", "up_proj", "down_proj"),
    Linears("w1", "w3", "w2"),
    Linears("gate_up_proj", "", "down_proj"),
    Linears("input_linear", "", "output_linear"),
)


class _Given(torch.nn.Module):
    """Stands for a linear: takes one input and gives a value prepared for it."""

    def __init__(self, given: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__()
        self._pair = (given, value)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        given, value = self._pair
        if rows is not given:
            raise Differs("it does more than gate: its linears are handed something else than its input")
        return value


class Gates(Operation[Activation]):
    """Gated dense layers, by the kernel's activation. Replaced ones raise RunnerError where a gradient is asked for.

    The linears stay the library's, and are called as before. On a device results are equal to the last bit; where the
    kernels are interpreted they may differ in the last places, as exponentials are numpy's there.
    """

    what, which = "gates", "gates of"

    def finds(self, model: Any) -> Iterator[Place]:
        for name, module in text_modules(model):
            linears = _linears_of(module)
            if linears is not None:
                refusal = "" if takes_one(module) else "it takes more than rows"
                refusal = OWN_FORWARD if "forward" in vars(module) else refusal
                kind, key = type(module).__name__, signature_of(module)
                yield Place(name, module, kind, refusal=refusal, key=key, given=linears)

    def candidates(self, place: Place) -> tuple[Activation, ...]:
        del place
        return _ACTIVATIONS

    def cases(self, place: Place) -> list[Case[Activation]]:
        module, linears = place.module, place.given
        gate, up = _gates(self.dtype, self.device)
        noise = Noise(self.device)
        rows = noise.normal(1, 1, dtype=self.dtype)
        both = torch.cat([gate, up], dim=-1)
        given = {linears.gate: _Given(rows, gate if linears.up else both)}
        if linears.up:
            given[linears.up] = _Given(rows, up)
        twin: Any = twin_of(module, submodules={**given, linears.down: torch.nn.Identity()})
        library = type(module).forward(twin, rows)

        def gates(activation: Activation) -> None:
            # the twin's halves are taken as the fused forward takes them
            ours = _fused(twin, linears, activation)(rows)
            check_kind(ours, library)
            if not _alike(ours, library, gate, up):
                raise Differs("it is no product of an activation known here: " + ", ".join(KINDS))

        first = next(part for part in module.children() if getattr(part, "in_features", 0))
        noise = Noise(self.device)
        whole = [noise.normal(1, count, int(first.in_features), dtype=self.dtype) for count in _ROW_COUNTS]
        return [gates, *[partial(_compare, module, linears, each) for each in whole]]

    def put(self, place: Place, candidate: Activation) -> None:
        place.module.forward = _fused(place.module, place.given, candidate)


def _linears_of(module: torch.nn.Module) -> Linears | None:
    for names in _LAYOUTS:
        parts = [module._modules.get(name) for name in names if name]
        # stacked experts keep matrices, not linears
        if all(part is not None and getattr(part, "in_features", 0) for part in parts):
            return names
    return None


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


def _compare(module: Any, linears: Linears, rows: torch.Tensor, activation: Activation) -> None:
    """Hold a whole layer against the library's."""
    library, ours = module.forward(rows), _fused(module, linears, activation)(rows)
    check_kind(ours, library)
    near = 64 * torch.finfo(rows.dtype).eps * float(library.float().abs().max())
    same = torch.equal(ours, library) if ours.is_cuda else torch.allclose(ours.float(), library.float(), atol=near)
    if not same:
        raise Differs("whole layers differ")


def _fused(module: torch.nn.Module, linears: Linears, activation: Activation) -> Forward:
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
