"""Bounds the time step of Mamba 2's single-token form, where the library bounds that of the chunk form alone.

The two forms would else be two functions: of nemotron_h, whose lower bound is above 0, a decoded token would leave
another state than the same token of a prompt, or of a trainer's pass. Knows no state. Called by `steps.py`, and by
`benchmarks.families` for the library's `generate`.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.nn.functional as F  # noqa: N812 - the usual name

from fdasync_transformers.model.recurrent.mixers import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_UPDATE = "mamba2_selective_state_update"
_UNBOUNDED = (0.0, float("inf"))


@contextmanager
def bounded_time_steps(model: torch.nn.Module) -> Iterator[None]:
    """Within the context the single-token form of all mixers in `model` (which may be one) has the bounds of their
    chunk form."""
    limits: dict[type, tuple[float, float]] = {}
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        if limit is not None and tuple(limit) != _UNBOUNDED and f"{_UPDATE}(" in source_of(type(module)):
            limits[type(module)] = (float(limit[0]), float(limit[1]))
    with ExitStack() as stack:
        for kind, bounds in limits.items():
            forward: Any = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
            names = forward.__globals__
            stack.enter_context(patch.dict(names, {_UPDATE: partial(_update, names[_UPDATE], bounds)}))
        yield


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
