"""The engine's sampling parameters, of the fields that a dialect's table names. Pure.

Called by the modules that read bodies; each decides what no field alone says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync import SamplingParams
from fdasync.request import MAX_LOGIT_BIAS
from fdasync_http.fields import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fdasync_http.fields import Described


def params_of(asked: Described, **decided: Any) -> SamplingParams:
    """The engine's parameters; the engine checks ranges.

    Args:
        asked: has the fields; its table says which parameter each of them gives.
        decided: parameters that its caller makes of several fields, or of what it knows besides.
    """
    found: dict[str, Any] = {}
    for name, rule in asked.RULES.items():
        if isinstance(rule, Engine) and rule.fields[0] in _READ and hasattr(asked, name):
            field = rule.fields[0]
            found[field] = _READ[field](getattr(asked, name))
    return SamplingParams(**{**found, **decided})


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
