"""The gradient of an RMSNorm of the library by torch's own, which has one kernel for it on a GPU where the library's
code has two dozen.

Which form of torch's norm has the gradients of a class is found by trying: rows of usual size, with a random weight,
through both. Gradients agree but for roundings. Knows classes by their attributes alone. Called by `device_forms.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.fused.modules import Noise
from fdasync_transformers.fused.norms import epsilon
from torch.nn.functional import rms_norm

from fdasync_trainer.numerics.gradients.recomputed import with_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    #: rows [..., H], weight [H] or None, and what is added to the mean: what has the gradients of the norm
    Form = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]

_ROWS = 24
# of norms that do not say it
_SOME_COLUMNS = 96
# of a gradient's norm: the library rounds between its steps
_MOST_APART = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def norm_gradient(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Form | None:
    """The form that has a norm's gradients for rows of `dtype`, or None. Waits for the device."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    if set(parameters) - {"weight"} or epsilon(module) is None:
        return None
    weight = parameters.get("weight")
    # the pass that calls this may be one of inference
    with torch.inference_mode(mode=False), torch.enable_grad():
        noise = Noise(device)
        leaves = [noise.normal(_ROWS, _SOME_COLUMNS if weight is None else len(weight), dtype=dtype)]
        if weight is not None:
            leaves.append(noise.normal(*weight.shape, dtype=weight.dtype))
        given = noise.normal(*leaves[0].shape, dtype=dtype)
        for leaf in leaves:
            leaf.requires_grad_()
        library: Any = type(module).forward
        twin = with_parameters(module, dict(zip(parameters, leaves[1:], strict=True)))
        wanted = torch.autograd.grad(library(twin, leaves[0]), leaves, given)
        for form in (_plain, _wide, _one_plus):
            if _agrees(form, leaves, epsilon(module) or 0.0, given, wanted):
                return form
    return None


def _agrees(
    form: Form, leaves: list[torch.Tensor], eps: float, given: torch.Tensor, wanted: tuple[torch.Tensor, ...]
) -> bool:
    rows, weight = leaves[0], leaves[1] if len(leaves) > 1 else None
    if form is (_one_plus if weight is None else _plain) and (weight is None or weight.dtype is not rows.dtype):
        return False
    found = torch.autograd.grad(form(rows, weight, eps), leaves, given)
    most = _MOST_APART[rows.dtype]
    return all(
        bool((one.double() - other.double()).norm() <= most * other.double().norm())
        for one, other in zip(found, wanted, strict=True)
    )


def _plain(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return rms_norm(rows, rows.shape[-1:], weight, eps)


def _wide(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return rms_norm(rows.float(), rows.shape[-1:], None if weight is None else weight.float(), eps).to(rows.dtype)


def _one_plus(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    assert weight is not None
    return rms_norm(rows.float(), rows.shape[-1:], 1 + weight.float(), eps).to(rows.dtype)
