"""Finds the recurrent state of a model by one pass of one token, and proves that its mixers go on from a state.

Families have state of different shapes, and config fields do not tell them. Knows no steps. Called at start, by
`open_model.py` and `examine.py`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync.cache.snapshots import StateSpec
from fdasync.errors import UnsupportedModel
from fdasync_transformers.model import probe
from fdasync_transformers.model.recurrent.cache import StateLayer
from fdasync_transformers.model.recurrent.mixers import find_mixers, turns_state
from fdasync_transformers.model.recurrent.outputs import joined, per_token
from fdasync_transformers.model.recurrent.states import Part, StateLayout
from fdasync_transformers.model.recurrent.steps import MixedForward

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from fdasync_transformers.model.recurrent.states import Kind

# tokens of the proof, and where it is cut
_TOKENS, _CUT = 7, 4
# relative, in float32: the forms have other orders of sums
_TOLERANCE = 1e-3


class _Key(NamedTuple):
    """Layers' states that lie in one spec: of the library's kind and number, as they lie."""

    kind: Kind
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    turned: bool


class _Note:
    """Stands in for a mixer's forward: computes, and notes what the library's cache has afterwards."""

    def __init__(self, forward: MixedForward) -> None:
        self._forward = forward
        self.layer = StateLayer()

    def __call__(self, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        return self._forward.call(hidden, others, self.layer)


def find_state(model: PreTrainedModel) -> StateLayout | None:
    """The state of one sequence; None: the model keeps none. `model` may be on the meta device."""
    forwards = [MixedForward(mixer) for mixer in find_mixers(model)]
    notes = [_Note(forward) for forward in forwards]
    try:
        for forward, note in zip(forwards, notes, strict=True):
            forward.compute = note
        if forwards:
            probe.run(model)
    finally:
        for forward in forwards:
            forward.detach()
    if not forwards:
        return None
    rows: dict[_Key, list[int]] = {}
    found = []
    for forward, note in zip(forwards, notes, strict=True):
        for kind, index, state in note.layer.held():
            turned = kind == "recurrent" and turns_state(forward.mixer)
            shape = tuple(state.transpose(-1, -2).shape[1:] if turned else state.shape[1:])
            found.append((forward.mixer, kind, index, _Key(kind, index, shape, state.dtype, turned)))
    for mixer, _, _, key in found:
        rows.setdefault(key, []).append(mixer.layer)
    order = {key: number for number, key in enumerate(rows)}
    parts: dict[str, tuple[Part, ...]] = {}
    for mixer, kind, index, key in found:
        part = Part(kind, index, order[key], rows[key].index(mixer.layer), key.turned)
        parts[mixer.name] = (*parts.get(mixer.name, ()), part)
    specs = [
        StateSpec(_name(list(rows), number), key.shape, str(key.dtype).removeprefix("torch."), tuple(layers))
        for number, (key, layers) in enumerate(rows.items())
    ]
    return StateLayout(tuple(specs), parts)


def _name(keys: list[_Key], number: int) -> str:
    """The kind, and how it lies; with a number where there are several of it."""
    kind = keys[number].kind
    same = [place for place, key in enumerate(keys) if key.kind == kind]
    name = f"{kind}-by-value" if keys[number].turned else kind
    return name if len(same) == 1 else f"{name}-{same.index(number)}"


def refuse_forgetful(
    model: PreTrainedModel, make_plain: Callable[[torch.nn.Module], torch.nn.Module] | None = None
) -> None:
    """Raise UnsupportedModel where the library's code of a mixer does not go on from a state: neither prompts in
    chunks nor cached tokens would then be right. Needs weights; one mixer of each class is tried.

    `make_plain`: makes a copy of a mixer plain, in place, where weights may be kept as stored.
    """
    tried: set[type] = set()
    for mixer in find_mixers(model):
        kind = type(mixer.module)
        if kind in tried:
            continue
        tried.add(kind)
        module = copy.deepcopy(mixer.module)
        module = (module if make_plain is None else make_plain(module)).float().cpu()
        width = int(model.config.get_text_config().hidden_size)
        forward = MixedForward(type(mixer)(mixer.name, module, mixer.layer, mixer.hidden, mixer.cache, mixer.others))
        hidden = torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            whole = _played(forward, hidden, [_TOKENS])
            for what, counts in (
                ("several tokens", [_CUT, _TOKENS - _CUT]),
                ("a token", [_CUT, *[1] * (_TOKENS - _CUT)]),
            ):
                error = float((_played(forward, hidden, counts) - whole).norm() / whole.norm())
                if not error <= _TOLERANCE:
                    raise UnsupportedModel(
                        str(model.config.model_type),
                        f"its recurrent layers do not go on from a state: {what} of {mixer.name} ({kind.__name__})"
                        f" behind others are not what they are in one pass (relative error {error:.1e})",
                    )


def _played(forward: MixedForward, hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
    layer = StateLayer()
    others = dict.fromkeys(forward.mixer.others)
    outputs = [
        per_token(forward.call(piece, others, layer), 1, piece.shape[1]) for piece in torch.split(hidden, counts, 1)
    ]
    return torch.cat([whole.flatten(2) for whole in joined(outputs) if whole is not None], 2)
