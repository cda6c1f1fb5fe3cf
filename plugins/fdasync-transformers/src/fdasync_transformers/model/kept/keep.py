"""Makes the experts' weights of a model, which is on the meta device, ones that are kept as they are stored.

Their parameters get the stored form's shapes and dtypes, so no plain weight ever takes memory. Knows modules of the
library by its experts interface. Called by `start/stored.py`, and for fingerprints by `named.py`, after ranks have cut
the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import ConfigError
from fdasync_transformers.model.kept.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_transformers.model.kept.forms import Form

_FIELD = "runner_config.quantised_weights"
_HINT = 'use "dequantised"'


def keep_experts(model: torch.nn.Module, form: Form) -> int:
    """Keep the experts' matrices of every layer in this form; returns how many parameters are.

    Raises ConfigError, before anything is changed, for experts that the kernels could not read so.
    """
    found = list(_experts_of(model))
    if not found:
        raise ConfigError(_FIELD, "this model has no experts whose weights could stay as they are stored", hint=_HINT)
    for path, module, name, halves in found:
        problem = _problem(module, name, form, halves)
        if problem:
            raise ConfigError(_FIELD, f"{path}.{name} cannot stay {form.name}: {problem}", hint=_HINT)
    for _, module, name, _ in found:
        _keep(module, name, form)
    return len(found)


def has_experts(model: torch.nn.Module) -> bool:
    """Whether there are experts that could be kept."""
    return any(path.rpartition(".")[2] == "experts" for path, _ in model.named_modules())


def _experts_of(model: torch.nn.Module) -> Iterator[tuple[str, Any, str, int]]:
    """Path, module, name of a parameter, and matrices of it that stand one below the other."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != "experts":
            continue
        experts: Any = module
        gated = getattr(experts, "has_gate", None)
        if gated is None:
            problem = f"{path} ({type(module).__name__}) does not take the library's experts interface"
            raise ConfigError(_FIELD, problem, hint=_HINT)
        yield path, experts, "gate_up_proj" if gated else "up_proj", 2 if gated and experts.is_concatenated else 1
        yield path, experts, "down_proj", 1


def _problem(module: Any, name: str, form: Form, halves: int) -> str:
    parameter = module._parameters.get(name)
    if parameter is None or parameter.dim() != 3:
        return "it is no parameter of three dimensions"
    if parameter.dtype is not torch.bfloat16:
        return f"the model is {str(parameter.dtype).removeprefix('torch.')}, and kernels compute it in bfloat16"
    if bool(module.is_transposed) != form.transposed:
        return f"the library has it {'transposed' if module.is_transposed else 'by rows'}"
    problem = form.problem(tuple(parameter.shape), halves=halves)
    return f"it has matrices {problem}" if problem else ""


def _keep(module: Any, name: str, form: Form) -> None:
    plain = module._parameters[name]
    values, scales = form.empty(tuple(plain.shape), plain.device)
    module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    module._parameters[name + form.scales_end] = torch.nn.Parameter(scales, requires_grad=False)
    # goes before the parameter of that name
    vars(module)[name] = Kept(form, module._parameters, name)
