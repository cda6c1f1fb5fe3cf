"""Sampling parameters: the fields that the dialects share, and the engine's, of a dialect's fields. Pure.

Called by the modules that read bodies; each decides what no field alone says.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import SamplingParams
from fdasync.errors import InvariantBroken
from fdasync.request import MAX_LOGIT_BIAS
from fdasync_http.fields import served_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that all dialects take under the engine's names."""

    min_p: float = 0.0
    stop_token_ids: list[int | None] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}


class SamplingBody(Sampled, frozen=True, kw_only=True):
    """Fields that the `sampling_params` of SGLang and of vLLM share."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    stop: str | list[str] = []
    skip_special_tokens: bool = True


def params_of(asked: msgspec.Struct, **decided: Any) -> SamplingParams:
    """The engine's parameters; the engine checks ranges.

    Args:
        asked: has the fields; its table says which parameter each of them gives.
        decided: parameters that its caller makes of several fields, or of what it knows besides.
    """
    found = {field: read(getattr(asked, name)) for name, field, read in _readers_of(type(asked))}
    return SamplingParams(**{**found, **decided})


@cache
def _readers_of(kind: type[msgspec.Struct]) -> list[tuple[str, str, Callable[[Any], Any]]]:
    """For each field of a body whose value is a parameter: its name, the parameter, and what makes that of it."""
    served = [(name, rule.fields[0]) for name, rule in served_by(kind).items() if rule.fields[0] in _READ]
    given: dict[str, str] = {}
    for name, field in served:
        if given.setdefault(field, name) != name:
            problem = f"{kind.__name__}: {given[field]} and {name} both give {field}"
            raise InvariantBroken(f"{problem}; let `decided` of `params_of` have the one that was sent")
    return [(name, field, _READ[field]) for name, field in served]


def count_of(value: bool | int | None) -> int | None:
    """How many alternatives are asked for; None: no log-probs are. Clients say true for one, false for none."""
    return None if value is None or value is False else int(value)


def texts_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings, of one or of a list."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _ids(stop: Sequence[int | None] | None) -> tuple[int, ...]:
    # AReaL appends the id of padding, which may be null
    return tuple([token for token in stop or () if token is not None])


def _clamped(biases: Mapping[int, float] | None) -> dict[int, float]:
    return {token: min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for token, bias in (biases or {}).items()}


def _as_it_is(value: Any) -> Any:
    return value


# parameters that are the value of one field
_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((
        "min_tokens", "temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "n", "ignore_eos",
    ), _as_it_is),
    # SGLang's and vLLM's word for all
    "top_k": lambda value: 0 if value == -1 else value,
    "logit_bias": _clamped,
    "stop": texts_of,
    "stop_token_ids": _ids,
}  # fmt: skip
