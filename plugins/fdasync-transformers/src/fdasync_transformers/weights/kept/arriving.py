"""Tensors of an update that come quantised, as a checkpoint has them: which belong together, and where they go.

FP8 comes as NAME (float8_e4m3fn) and NAME_scale_inv, in blocks of 128 x 128; MXFP4 as NAME_blocks and NAME_scales. Both
parts of a tensor come in one update. Where the model keeps that form the bytes are copied; else the tensor is
dequantised when both parts are there. Knows names and shapes; knows no bytes. Called by `update.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import WeightsRejected
from fdasync_transformers.model.kept.forms import FORMS, FP8, MXFP4
from fdasync_transformers.weights.kept.targets import Blocks, Exponents, Joining, KeptTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.runner.base import TensorMeta
    from fdasync_transformers.model.kept.forms import Form
    from fdasync_transformers.parallel.cuts import Target
    from fdasync_transformers.weights.kept.targets import Place

_FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_SCALE_DTYPES = ("float32", "bfloat16", "float16")


class Pair(NamedTuple):
    """Both parts of a tensor that comes quantised.

    Attributes:
        name: of the tensor, as a plain one would be named.
        form: that it comes in.
        shape: that a plain one would have.
        values, scales: as they come.
    """

    name: str
    form: Form
    shape: tuple[int, ...]
    values: TensorMeta
    scales: TensorMeta


def pairs_of(tensors: Sequence[TensorMeta]) -> dict[str, Pair]:
    """The pair that two parts are, by the names of both. Raises WeightsRejected for a part that comes alone, and for
    parts that do not fit each other."""
    named = {tensor.name: tensor for tensor in tensors}
    found: dict[str, Pair] = {}
    for form in FORMS:
        values_end, scales_end = form.stored_ends
        for name, scales in named.items():
            stem = name.removesuffix(scales_end)
            values = named.get(stem + values_end)
            if stem == name or (form is MXFP4 and values is None):
                # tensors of other kinds may end so, too
                continue
            if values is None:
                raise WeightsRejected(f"{name} comes without {stem + values_end}, whose scales it has")
            pair = _fitting(form, stem, values, scales)
            found[values.name] = found[scales.name] = pair
    for tensor in tensors:
        if tensor.dtype in _FP8_DTYPES and tensor.name not in found:
            raise WeightsRejected(f"{tensor.name} comes in {tensor.dtype} without {tensor.name}{FP8.scales_end}")
    return found


def _fitting(form: Form, stem: str, values: TensorMeta, scales: TensorMeta) -> Pair:
    if form is FP8:
        if values.dtype != "float8_e4m3fn" or scales.dtype not in _SCALE_DTYPES or len(values.shape) not in (2, 3):
            problem = f"{values.name} is {values.dtype} {values.shape} with scales in {scales.dtype}"
            raise WeightsRejected(f"{problem}: matrices of float8_e4m3fn with float scales are taken")
        shape = tuple(values.shape)
        wanted = form.shapes(shape)[1]
    else:
        if (values.dtype, scales.dtype) != ("uint8", "uint8") or len(values.shape) != 4 or values.shape[3] != 16:
            problem = f"{values.name} is {values.dtype} {values.shape} with scales in {scales.dtype}"
            raise WeightsRejected(f"{problem}: bytes [experts, rows, groups, 16] and byte exponents are taken")
        experts, rows, groups, _ = values.shape
        if groups % 2:
            raise WeightsRejected(f"{values.name} has an odd number of groups of 32, {groups}")
        shape = (experts, 32 * groups, rows)
        wanted = (experts, rows, groups)
    if tuple(scales.shape) != wanted:
        problem = f"{scales.name} has shape {tuple(scales.shape)}, and {values.name} needs {wanted}"
        raise WeightsRejected(f"{problem}{' for blocks of 128 x 128' if form is FP8 else ''}")
    return Pair(stem, form, shape, values, scales)


def places_of(pair: Pair, target: Target | KeptTarget) -> tuple[Place, Place]:
    """Where values and scales of a pair go, whose place a plain tensor would have."""
    if isinstance(target, KeptTarget) and target.form is pair.form:
        if pair.form is FP8:
            return target.values, target.scales
        return Blocks(target.values), Exponents(target.scales)
    values, scales = Joining(pair.form, (tuple(pair.values.shape), tuple(pair.scales.shape)), target).sides
    return values, scales
