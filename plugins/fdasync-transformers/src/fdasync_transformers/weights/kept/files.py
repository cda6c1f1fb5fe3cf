"""Reads a stored tensor into a place that is kept as stored: byte by byte where the file has its form, else quantised.

Knows the layouts of files; knows no models. Called by `reading.py` and `loading.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fdasync_kernels.experts.stored import BLOCK

from fdasync.errors import BadInput, CheckpointError, ConfigError
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.weights.layouts.scaled import Mxfp4, Scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fdasync_transformers.model.kept.forms import Form
    from fdasync_transformers.weights.kept.targets import KeptTarget
    from fdasync_transformers.weights.open_shards import OpenShards
    from fdasync_transformers.weights.placement import Placement
    from fdasync_transformers.weights.shards import StoredTensor

_E8M0_BIAS = 127.0
# of a band of rows in float32
_BAND_NBYTES = 64 << 20


def form_of(stored: StoredTensor) -> Form | None:
    """The form that a stored tensor has; None: it is plain, or quantised in another way."""
    quantized = stored.quantized
    if quantized is None:
        return None
    if isinstance(quantized.layout, Mxfp4):
        return MXFP4
    is_fp8 = isinstance(quantized.layout, Scaled) and quantized.layout.dtype is torch.float32
    if is_fp8 and quantized.parts["values"].dtype == "F8_E4M3" and quantized.block == (BLOCK, BLOCK):
        return FP8
    return None


def refuse_remade(
    tensors: Mapping[str, StoredTensor], placements: Mapping[str, Placement], forms: Mapping[str, Form]
) -> None:
    """Raise ConfigError where a tensor that is kept is stored in another form: quantising it at a start would change
    the model. `forms`: of the model's tensors that are kept, by name."""
    for key, where in placements.items():
        form = forms.get(where.target)
        if form is not None and form_of(tensors[key]) is not form:
            problem = f"{key} is not stored as {form.name}, as the checkpoint's config says"
            raise ConfigError("runner_config.quantised_weights", problem, hint='use "dequantised"')


def copy_kept(
    shards: OpenShards,
    stored: StoredTensor,
    target: KeptTarget,
    rows_of: Callable[[OpenShards, StoredTensor, int, int, torch.Tensor], torch.Tensor],
) -> None:
    """Copy a stored tensor of the target's shape into it. `rows_of` reads plain rows. Raises CheckpointError."""
    try:
        if form_of(stored) is target.form:
            _copy(shards, stored, target)
            return
        like = torch.empty((), dtype=torch.bfloat16, device=target.device)
        rows, nbytes = stored.shape[0], 4 * torch.Size(stored.shape[1:]).numel()
        step = target.step * max(1, _BAND_NBYTES // (nbytes * target.step))
        if stored.converted is not None:
            # made anew for each band
            step = rows
        for first in range(0, rows, step):
            last = min(first + step, rows)
            target.put(first, rows_of(shards, stored, first, last, like).to(target.device))
    except BadInput as error:
        raise CheckpointError(str(stored.file), f"{stored.name}: {error}") from error


def _copy(shards: OpenShards, stored: StoredTensor, target: KeptTarget) -> None:
    quantized = stored.quantized
    assert quantized is not None
    values, scales = quantized.parts["values"], quantized.parts["scales"]
    if len(stored.shape) == 2:
        whole = shards.tensor(values.file, values.name)
        grid = _numbers(shards.tensor(scales.file, scales.name)).reshape(target.scales.shape)
        target.put_stored(0, whole, grid)
        return
    for first in range(stored.shape[0]):
        some, factors = (
            shards.rows(part.file, part.name, first, first + 1).to(target.device) for part in (values, scales)
        )
        if target.form is MXFP4:
            some, factors = MXFP4.packed(some, factors)
        target.put_stored(first, some, _numbers(factors) if target.form is FP8 else factors)


def _numbers(scales: torch.Tensor) -> torch.Tensor:
    """float32 of scales of FP8: of bytes, which are exponents, powers of two."""
    return (scales.float() - _E8M0_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()
