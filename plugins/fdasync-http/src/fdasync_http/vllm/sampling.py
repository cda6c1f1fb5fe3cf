"""vLLM's `sampling_params`, and what they are here. Pure.

Fields and defaults are those of vLLM's own `SamplingParams`. A field whose meaning is not
served is refused when it is set to something else than its default. Called by `generate.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import SamplingParams
from fdasync_http.failures import Refused
from fdasync_http.grammars import grammar_of

if TYPE_CHECKING:
    from fdasync_http.client_names import Table

# fields for which a value other than these asks for something that is not served
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "bad_words": (None, []), "guided_decoding": (None,), "allowed_token_ids": (None,), "logits_processors": (None,),
    "truncate_prompt_tokens": (None,),
    # renderers asks so for log-probs in a binary form, and reads JSON where it gets none
    "extra_args": (None, {}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False}),
    "thinking_token_budget": (None,), "repetition_detection": (None,),
    "best_of": (None, 1), "use_beam_search": (None, False),
}  # fmt: skip
# fields that say how an engine that this one is not shall work
_IGNORED = (
    "detokenize", "output_kind", "spaces_between_special_tokens", "skip_clone", "skip_reading_prefix_cache",
    "flat_logprobs",
)  # fmt: skip


#: by the engine's field: those of the body that ask for it
FIELDS: Table = {
    **{name: (f"sampling_params.{name}",) for name in (
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed", "n",
        "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "logit_bias",
    )},
    "top_logprobs": ("sampling_params.logprobs",),
    "prompt_logprobs_start": ("sampling_params.prompt_logprobs",),
    "prompt_top_logprobs": ("sampling_params.prompt_logprobs",),
    "start": ("sampling_params.routed_experts_prompt_start",),
    "prompt": ("token_ids",),
}  # fmt: skip


class Sampling(msgspec.Struct, frozen=True):
    """The fields on the wire; see vLLM's documentation. `_UNSERVED` and `_IGNORED` list others that it knows."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    routed_experts_prompt_start: int | None = None
    structured_outputs: dict[str, Any] | None = None


_KNOWN = set(Sampling.__struct_fields__)


def sampling_of(raw: dict[str, Any]) -> Sampling:
    """The fields of a request's `sampling_params`. Raises Refused, which names the field."""
    for name in [name for name in raw if name not in _KNOWN]:
        field = f"sampling_params.{name}"
        if name in _UNSERVED:
            if raw[name] not in _UNSERVED[name]:
                raise Refused(400, f"{field} is not served", param=field, code="not_served")
        elif name not in _IGNORED:
            raise Refused(400, f"unknown field {field!r}", param=field, code="unknown_field")
    try:
        return msgspec.convert({name: value for name, value in raw.items() if name in _KNOWN}, Sampling)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        field = f"sampling_params{path.rstrip('`')}"
        raise Refused(400, f"{field}: {words}", param=field, code="bad_input") from None


def params_of(sampling: Sampling, *, room_tokens: int) -> SamplingParams:
    """The engine's parameters; the engine checks ranges. Log-probs are the model's own, as vLLM's are unless it is told
    otherwise.

    Args:
        room_tokens: tokens that the context leaves, for a request without `max_tokens`.
    """
    stop = sampling.stop or ()
    top_k = sampling.top_k or 0
    return SamplingParams(
        max_tokens=max(room_tokens, 1) if sampling.max_tokens is None else sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=0 if top_k == -1 else top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or {},
        grammar=grammar_of(sampling, "sampling_params."),
        n=sampling.n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        ignore_eos=sampling.ignore_eos,
        logprobs="none" if sampling.logprobs is None else "raw",
        top_logprobs=max(sampling.logprobs or 0, 0),
        prompt_logprobs_start=None if sampling.prompt_logprobs is None else 0,
        prompt_top_logprobs=max(sampling.prompt_logprobs or 0, 0),
    )
