"""Bounds the time step of Mamba 2's single-token form, where the library bounds only the chunk form's.

The two forms would else be two functions: of nemotron_h, whose lower bound is above 0, a decoded token would leave
another state than the same token of a prompt, or of a trainer's pass. A bounded forward is the library's code with
another function under one of its names; the library's module stays as it is. Knows no state. Called by `steps.py`, and
by `tests.nightly.families.families` for the library's `generate`.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F  # noqa: N812 - the usual name

from fdasync_transformers.model.recurrent.mixers import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_UPDATE = "mamba2_selective_state_update"
_UNBOUNDED = (0.0, float("inf"))


def bounded_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The forward of a mixer, with the bounds of its chunk form in its single-token form; None: they are the same."""
    limit = getattr(module, "time_step_limit", None)
    if limit is None or tuple(limit) == _UNBOUNDED or f"{_UPDATE}(" not in source_of(type(module)):
        return None
    library: Any = inspect.unwrap(type(module).forward)
    update = partial(_update, library.__globals__[_UPDATE], (float(limit[0]), float(limit[1])))
    names = {**library.__globals__, _UPDATE: update}
    bounded = FunctionType(library.__code__, names, library.__name__, library.__defaults__, library.__closure__)
    bounded.__kwdefaults__ = library.__kwdefaults__
    return MethodType(bounded, module)


@contextmanager
def bounded_time_steps(model: torch.nn.Module) -> Iterator[None]:
    """Within the context every mixer of a model that no server serves has its bounded forward."""
    bounded: list[Any] = []
    try:
        for module in model.modules():
            forward = bounded_forward(module)
            if forward is not None:
                vars(module)["forward"] = forward
                bounded.append(module)
        yield
    finally:
        for module in bounded:
            del vars(module)["forward"]


def _update(
    library: Callable[..., torch.Tensor],
    limit: tuple[float, float],
    state: torch.Tensor,
    hidden: torch.Tensor,
    dt: torch.Tensor,
    *args: Any,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return library(state, hidden, dt.clamp(*limit), *args, dt_bias=None, dt_softplus=False, **kwargs)
