"""What a trainer's forward pass with fixed numerics refuses, and the ways out.

Knows modules and devices; knows no batches. Called by `trainer.py`: for the model when its numerics become fixed, for
the circumstances of each pass when it begins.
"""

from __future__ import annotations

from typing import Any

import torch

from fdasync.errors import BadInput, UnsupportedModel
from fdasync_transformers.model.refusals import refuse_unservable

# attributes of modules by which values are dropped, or noise is added, in training
_RANDOM = ("dropout", "dropout_prob", "layerdrop", "jitter")


def refuse_model(model: torch.nn.Module) -> str:
    """Refuse a model that cannot have fixed numerics in a trainer; returns its type.

    Raises:
        BadInput: a compiled model, or none of the library's.
        UnsupportedModel: one that could not be served either, with the reason.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if any(getattr(part, "_compiled_call_impl", None) or "_orig_mod" in part._modules for part in model.modules()):
        raise compiled()
    if not isinstance(kind, str):
        raise BadInput("model", f"{type(model).__name__} is no transformers model", hint="give the one it wraps")
    refuse_unservable(model)  # type: ignore[arg-type]
    return kind


def compiled() -> BadInput:
    """The error about torch.compile."""
    return BadInput("model", "is compiled by torch.compile, which has other bits than a rollout", hint="run it eagerly")


def random_parts(model: torch.nn.Module) -> tuple[tuple[str, torch.nn.Module, str], ...]:
    """Path, module and attribute of all that may drop values or add noise in training."""
    return tuple(
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float | int) and _is_random(module, name)
    )


def _is_random(module: torch.nn.Module, name: str) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return name == "p"
    return any(word in name for word in _RANDOM)


def refuse_pass(kind: str, device: torch.device, parts: tuple[tuple[str, torch.nn.Module, str], ...]) -> None:
    """Refuse a pass whose bits would not be the rollout's.

    Raises:
        BadInput: torch.compile, autocast, or dropout or noise in training, naming the module.
        UnsupportedModel: a device other than a CPU or of CUDA.
    """
    if torch.compiler.is_compiling():
        raise compiled()
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModel(kind, f"fixed numerics of a trainer run on CPUs and CUDA devices, and it is on {device}")
    if torch.is_autocast_enabled(device.type):
        raise BadInput(
            "model",
            "runs under autocast, which computes in other dtypes than the rollout",
            hint="give it parameters of the served dtype, for instance by FSDP2's MixedPrecisionPolicy",
        )
    for path, module, name in parts:
        value: Any = getattr(module, name, 0)
        if module.training and value:
            raise BadInput(
                "model", f"{path or type(module).__name__}: {name} is {value} in training", hint="set it to 0"
            )
