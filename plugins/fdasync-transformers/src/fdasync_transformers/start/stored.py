"""Weights that stay as their checkpoint stores them: what is refused, and which form the experts of a model keep.

Knows configurations and the room `model/kept`; knows no steps. Called by `runner.py`, `open_model.py` and
`examine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.experts.stored import BLOCK

from fdasync.errors import ConfigError
from fdasync_transformers.model.kept.forms import FORMS, FP8
from fdasync_transformers.model.kept.keep import has_experts, keep_experts
from fdasync_transformers.model.kept.kept import kept_forms
from fdasync_transformers.model.kept.linears import keep_linears, linears_of
from fdasync_transformers.start.runner_config import uses_kernels
from fdasync_transformers.weights.kept.files import form_of
from fdasync_transformers.weights.mapping import locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.model.kept.forms import Form
    from fdasync_transformers.parallel.cuts import Cut
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.weights import loading
    from fdasync_transformers.weights.names import Names

_FIELD = "runner_config.quantised_weights"
_HINT = 'use "dequantised"'


def check_stored(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> None:
    """Raise ConfigError where weights are to stay as stored, and a setting or the device does not allow it."""
    asked = config.quantised_weights
    if asked == "dequantised":
        return
    if not uses_kernels(config, device):
        raise ConfigError(_FIELD, f"{asked!r} needs kernels, which {device} has not", hint=_HINT)
    if config.experts not in ("auto", "fused"):
        problem = f"{asked!r} weights are read by the fused experts, and experts are {config.experts!r}"
        raise ConfigError(_FIELD, problem, hint='leave experts "auto"')
    if config.dtype not in ("auto", "bfloat16"):
        problem = f"{asked!r} weights are computed in bfloat16, and dtype is {config.dtype!r}"
        raise ConfigError(_FIELD, problem, hint=_HINT)
    if limits.numerics == "fixed":
        raise ConfigError(_FIELD, f"{asked!r} has no fixed numerics: a trainer has plain weights", hint=_HINT)
    if limits.sum_slices > 1:
        raise ConfigError(_FIELD, f"{asked!r} has no sums of {limits.sum_slices} slices", hint="use sum_slices=1")


def keep_stored(
    model: PreTrainedModel,
    checkpoint: loading.Checkpoint,
    config: TransformersConfig,
    names: Names,
) -> bool:
    """Keep weights of a model, on the meta device and cut for this rank, in the form of its checkpoint, where the
    configuration asks for it; whether it does.

    Raises ConfigError where that cannot be.
    """
    if config.quantised_weights == "dequantised":
        return False
    form = _form_of(checkpoint, model.dtype)
    linears = config.quantised_weights == "stored_linears"
    if linears and form is not FP8:
        problem = f"linear layers of {form.name} checkpoints are plain, and those of FP8 can stay as they are stored"
        raise ConfigError(_FIELD, problem, hint='use "stored"')
    if not linears or has_experts(model):
        keep_experts(model, form)
    for name, held in kept_forms(model).items():
        _check_cut(model, name, held, names.cuts.get(name))
    if linears:
        keep_linears(model, _linears(model, checkpoint, config, names))
    return True


def _check_cut(model: PreTrainedModel, name: str, form: Form, cut: Cut | None) -> None:
    """Raise ConfigError where a rank's part of experts would end within a block."""
    if cut is None:
        return
    if form is not FP8:
        problem = f"{form.name} experts are not cut over ranks: their exponents go by 32 inner places"
        raise ConfigError(_FIELD, problem, hint=f"{_HINT}, or one GPU")
    path, _, last = name.rpartition(".")
    held: Any = model.get_submodule(path)._parameters[last]
    each = held.shape[cut.dim] // cut.pieces
    if each % BLOCK:
        problem = f"{cut.count} ranks would cut {name} within a block of {BLOCK}: {each} of its width on each"
        raise ConfigError(_FIELD, problem, hint=f"{_HINT}, or fewer ranks")


def _linears(
    model: PreTrainedModel, checkpoint: loading.Checkpoint, config: TransformersConfig, names: Names
) -> list[str]:
    """Paths of the linear layers that are kept as stored: the layers that the checkpoint stores so, or all possible
    layers where weights are drawn."""
    stored: set[str] | None = None
    if config.weights != "random":
        keys = [key for key, held in checkpoint.tensors.items() if len(held.shape) == 2 and form_of(held) is FP8]
        stored = {where.target for where in locate(names, keys).placements.values() if where.row < 0}
    found = []
    for path, module in linears_of(model):
        cut = names.cuts.get(f"{path}.weight")
        whole = cut is None or (cut.pieces == 1 and module.weight.shape[cut.dim] % BLOCK == 0)
        if whole and (stored is None or f"{path}.weight" in stored):
            found.append(path)
    return found


def _form_of(checkpoint: loading.Checkpoint, dtype: torch.dtype) -> Form:
    scheme = checkpoint.scheme
    if scheme is None:
        raise ConfigError(_FIELD, "this checkpoint is not quantised", hint=_HINT)
    form = next((form for form in FORMS if form.name == scheme.name), None)
    blocks: Any = getattr(scheme.layouts[0], "blocks", None) if scheme.layouts else None
    if form is None or (form is FP8 and blocks != ((BLOCK, BLOCK),)):
        sizes = f" in blocks of {' x '.join(map(str, blocks[0]))}" if form is FP8 and blocks else ""
        problem = f"{scheme.name}{sizes} is not read as stored: FP8 in blocks of {BLOCK} x {BLOCK} and MXFP4 are"
        raise ConfigError(_FIELD, problem, hint=_HINT)
    if dtype is not torch.bfloat16:
        problem = f'"stored" weights are computed in bfloat16, and this model is {str(dtype).removeprefix("torch.")}'
        raise ConfigError(_FIELD, problem, hint='use dtype="bfloat16"')
    return form
