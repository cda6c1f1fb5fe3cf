"""What a trainer gives to `engine.update_weights`: its model's tensors, and the fingerprint that they have there.

A trainer has its weights in a dtype of its own (float32 masters), the server in the dtype that it serves. Both sides
round to it in the same way, so the fingerprints are equal exactly where the trainer's rounded weights are the server's.
The server's dtypes come from building the model without memory: a cast of a whole model (`model.to`) rounds what the
library keeps in float32, and changes no name and no shape. Knows no engine. Called by trainers, in their own process,
by `fdasync verify-trainer`, and for dtypes by fixed numerics.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from fdasync.errors import BadInput, WeightsRejected
from fdasync_transformers.model.kept.forms import FORMS
from fdasync_transformers.model.kept.keep import has_experts, keep_experts
from fdasync_transformers.model.kept.kept import Kept, logical_state
from fdasync_transformers.model.kept.linears import keep_linears, linears_of
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.deltas.tensors import DTYPES, dtype_name, own_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.request import WeightsFingerprint

NamedTensor = tuple[str, str, tuple[int, ...], "NDArray[np.uint8]"]

#: by name, the dtypes that engines serve in
SERVED = {name: DTYPES[name] for name in ("float32", "bfloat16", "float16", "float64")}


def named_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[NamedTensor]:
    """(name, dtype, shape, buffer) of every tensor of a model, or of a state dict under its own names.

        await engine.update_weights(version, named_tensors(model))

    A buffer is the tensor's bytes, flat. Tensors that lie on the CPU in one piece are not copied: their buffers are
    views, so leave the weights alone until the update has ended. Other tensors (on a GPU, transposed) are copied here.
    A tied tensor comes once, under its first name. Give a state dict to send some tensors only: the others keep their
    values. Parts sharded over processes must be gathered first.

    Raises WeightsRejected for a tensor without data, or of a dtype that no runner takes.
    """
    named: list[NamedTensor] = []
    for name, tensor in own_tensors(source):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        named.append((name, dtype_name(name, tensor), tuple(tensor.shape), flat.view(torch.uint8).numpy()))
    return named


def weights_fingerprint(
    model: torch.nn.Module,
    *,
    dtype: str | torch.dtype,
    state: Mapping[str, torch.Tensor] | None = None,
    stored: Literal["fp8", "mxfp4", "fp8_linears"] | None = None,
) -> WeightsFingerprint:
    """The fingerprint that an engine has once it was given this model's weights.

        expected = weights_fingerprint(model, dtype="bfloat16")
        await engine.update_weights(version, named_tensors(model), expected=expected)

    Parts that the library keeps in float32 count in float32, others rounded to `dtype` (to nearest, ties to even);
    persistent buffers count (correction biases), and a tied tensor counts under each of its names. Tensors are rounded
    and hashed one by one; nothing is changed.

    Args:
        model: the library's model for causal language modelling, as the trainer has it, on any device.
        dtype: that the engine serves in (`engine.facts().dtype`).
        state: the model's whole tensors by the names of its state dict, where the model holds only parts of them
            (FSDP); None: the model's own.
        stored: the form in which an engine with `quantised_weights="stored"` keeps the experts' weights, which it makes
            of plain ones by the published recipe: they count with the values they then stand for. "fp8_linears": of an
            engine with "stored_linears", whose checkpoint has every possible linear layer in FP8, and no rank cuts.

    Raises BadInput for another kind of model and for a dtype that is not served; ConfigError for experts that cannot be
    kept so; WeightsRejected naming a tensor that is missing, too much, of another shape or sharded, or a computed
    buffer (the frequencies of rotary embeddings) in another dtype than the server's, as `model.to(dtype)` leaves it:
    the trainer's forward pass reads other values.
    """
    served = SERVED.get(str(dtype).removeprefix("torch."))
    if served is None:
        raise BadInput("dtype", f"{dtype!r} is not served", limit=", ".join(SERVED))
    if not isinstance(model, PreTrainedModel):
        raise BadInput("model", f"{type(model).__name__} is no model of the library", hint="give the model inside it")
    layout = served_layout(model, served)
    _check_computed(model, layout)
    linears = stored == "fp8_linears"
    for form in FORMS:
        if form.kind == ("fp8" if linears else stored) and (not linears or has_experts(layout)):
            keep_experts(layout, form)
    if linears:
        keep_linears(layout, [path for path, _ in linears_of(layout)])
    tensors = _rounded(model.state_dict() if state is None else state, logical_state(layout))
    return identity.fingerprint_of(tensors, True)


class OtherDtype(NamedTuple):
    """A tensor that is not as a server has it."""

    name: str
    here: torch.dtype
    served: torch.dtype


def served_layout(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as a server of this dtype builds it, on the meta device."""
    # FSDP puts a class of torch's in front
    own: Any = next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    with torch.device("meta"):
        layout: PreTrainedModel = own._from_config(copy.deepcopy(model.config), dtype=dtype)
    loading.keep_float32(layout, dtype)
    return layout


def dtypes_of(layout: torch.nn.Module, *, computed: bool = False) -> dict[str, torch.dtype]:
    """Dtypes of a layout's floating parameters and buffers by name; `computed`: only buffers that no checkpoint has."""
    tensors = layout.named_buffers() if computed else chain(layout.named_parameters(), layout.named_buffers())
    loaded = layout.state_dict() if computed else {}
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point() and name not in loaded}


def first_other(tensors: Iterable[tuple[str, torch.Tensor]], served: Mapping[str, torch.dtype]) -> OtherDtype | None:
    """The first tensor of another dtype than the server's; tensors that the server has not, as adapters', pass."""
    for name, tensor in tensors:
        if tensor.dtype != served.get(name, tensor.dtype):
            return OtherDtype(name, tensor.dtype, served[name])
    return None


def _check_computed(model: PreTrainedModel, layout: PreTrainedModel) -> None:
    other = first_other(model.named_buffers(), dtypes_of(layout, computed=True))
    if other is not None:
        problem = f"{other.name} is computed, not loaded: it is {other.here} here and {other.served} at the server"
        raise WeightsRejected(f"{problem}; a model that was cast whole (model.to) has it rounded")


def _rounded(
    state: Mapping[str, torch.Tensor], layout: Mapping[str, torch.Tensor | Kept]
) -> Iterator[tuple[str, torch.Tensor | Kept]]:
    """The tensors by name, in the dtypes of the layout, or quantised as it keeps them. Raises WeightsRejected."""
    if other := sorted(state.keys() ^ layout.keys()):
        side = "is missing" if other[0] in layout else "has no place in the model"
        raise WeightsRejected(f"{other[0]} {side} ({len(other)} names differ)")
    for name, want in sorted(layout.items()):
        tensor = state[name].detach()
        if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
            raise WeightsRejected(f"{name} holds no whole data: gather it, and give the tensors as `state`")
        if tensor.shape != want.shape:
            raise WeightsRejected(f"{name} has shape {tuple(tensor.shape)}, the server's has {tuple(want.shape)}")
        if tensor.is_floating_point() != want.is_floating_point():
            raise WeightsRejected(f"{name} is {tensor.dtype}, the server's is {want.dtype}")
        yield name, Kept.made_of(tensor, want.form) if isinstance(want, Kept) else tensor.to(want.dtype)
