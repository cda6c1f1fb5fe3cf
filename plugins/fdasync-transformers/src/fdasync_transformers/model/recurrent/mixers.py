"""Finds the modules of a model that keep recurrent state in the library's cache: *mixers*.

A mixer reads its sequence's state from the cache that it is handed, and leaves the new state there. It takes hidden
states [sequences, tokens, width] of sequences that are equally long. A module is known by the text of its methods, and
of methods that its forward calls. Needs no weights: models may be on the meta device. Knows no steps. Called by
`probe.py`, `steps.py` and `model/refusals.py`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fdasync.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

# by these a module leaves state in the library's cache: convolution, recurrence, and minimax's
_STATE_CALLS = (".update_conv_state(", ".update_recurrent_state(", ".set_linear_cache(")
# recurrences by the delta rule
_BY_KEY = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
# what all models have
_COMMON = ("torch.", "transformers.", "builtins")
_CACHE_NAMES = ("cache_params", "past_key_values")


@dataclass(frozen=True)
class Mixer:
    """One module that keeps state.

    Attributes:
        name: of the module in its model.
        module: the library's.
        layer: hidden-layer number.
        hidden, cache: names of the arguments that take hidden states and cache.
        others: names of further arguments that have no default.
    """

    name: str
    module: torch.nn.Module
    layer: int
    hidden: str
    cache: str
    others: tuple[str, ...]


def find_mixers(model: torch.nn.Module) -> tuple[Mixer, ...]:
    """Every mixer of a model, in the order of its modules. Raises UnsupportedModel where one names no cache."""
    found = []
    stateful: dict[type, bool] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in stateful:
            stateful[kind] = bool(state_calls(methods_of(kind)))
        if stateful[kind]:
            found.append(_mixer_of(name, module))
    return tuple(found)


def state_calls(source: str) -> int:
    """How often a text leaves state in the library's cache."""
    return sum(source.count(call) for call in _STATE_CALLS)


def turns_state(mixer: Mixer) -> bool:
    """Whether a mixer's recurrent state is [heads, keys, values], which lies the other way round: kernels sum over
    keys, which then lie side by side."""
    return any(f"{name}(" in source_of(type(mixer.module)) for name in _BY_KEY)


def _mixer_of(name: str, module: Any) -> Mixer:
    # of the class: the module's own may be wrapped already
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    cache = next((one.name for one in parameters if one.name in _CACHE_NAMES), "")
    if not cache or not hasattr(module, "layer_idx"):
        what = f"{name} ({type(module).__name__}) leaves state in a cache"
        raise UnsupportedModel(type(module).__name__, f"{what}, and its forward names neither the cache nor a layer")
    others = [
        one.name
        for one in parameters[1:]
        if one.name != cache and one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
    ]
    return Mixer(name, module, int(module.layer_idx), parameters[0].name, cache, tuple(others))


def source_of(kind: type) -> str:
    """The text of a module class's forward; "" where there is none."""
    return _text_of(getattr(kind, "forward", None))


def methods_of(kind: type) -> str:
    """The text of all methods that a module class has of a model's own file."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith(_COMMON) or ".models." in base.__module__]
    return "".join([_text_of(value) for base in own for value in vars(base).values() if inspect.isroutine(value)])


# no state: a function's text never changes. A start asks for that of each class several times, and finding it is slow
@cache
def _text_of(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""  # built in, or without a file
