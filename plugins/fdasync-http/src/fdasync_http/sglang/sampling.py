"""SGLang's `sampling_params`, and what they are here. Pure.

Fields and defaults are those of SGLang's own `SamplingParams`. A field
whose meaning is not served is refused when it is set to something else than its default. Called by `generate.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync import SamplingParams
from fdasync_http.failures import Refused
from fdasync_http.grammars import grammar_of

if TYPE_CHECKING:
    from fdasync.request import LogprobKind

# SGLang's word for "all"
_ALL = (-1, 0, 1 << 30)
# fields for which a value other than these asks for something that is not served
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (None,), "stop_regex": (None, "", []), "beam_width": (None, 0, 1),
    # slime asks so for the ids that top-p kept, and goes on without them
    "custom_params": (None, {}, {"return_top_p_token_ids": True}, {"return_top_p_token_ids": False}),
}  # fmt: skip


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields on the wire; see SGLang's documentation."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool = False
    custom_params: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    beam_width: int | None = None


def params_of(
    sampling: Sampling,
    *,
    where: str,
    logprobs: bool,
    top_logprobs: int,
    score_from: int | None,
    chosen_from: int | None,
    room_tokens: int,
) -> SamplingParams:
    """The engine's parameters. Raises Refused for what is not served; the engine checks ranges.

    Args:
        where: what the parameters stand in, with a dot.
        logprobs: the request asks for log-probs: those of the distribution that was sampled from, as SGLang's are.
            Without randomness (temperature 0) they are the model's own.
        score_from: position from which the prompt's own tokens get log-probs; None: none do.
        chosen_from: position from which the positions are told that indexers chose; None: none are.
        room_tokens: tokens that the context leaves, for a request without `max_new_tokens`.
    """
    for name, fine in _UNSERVED.items():
        if getattr(sampling, name) not in fine:
            raise Refused(400, f"{where}{name} is not served", param=where + name)
    if sampling.max_new_tokens is not None and sampling.max_new_tokens < 0:
        name = f"{where}max_new_tokens"
        raise Refused(400, f"{name}: {sampling.max_new_tokens} is too small (limit: at least 0)", param=name)
    stop = sampling.stop or ()
    # a request without new tokens scores its prompt; the one token that it makes is not given out
    most = max(room_tokens, 1) if sampling.max_new_tokens is None else max(sampling.max_new_tokens, 1)
    kind: LogprobKind = "raw" if sampling.temperature == 0 else "processed"
    return SamplingParams(
        max_tokens=most,
        min_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_k=0 if sampling.top_k in _ALL else sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.sampling_seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or {},
        grammar=grammar_of(sampling, where),
        n=sampling.n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        ignore_eos=sampling.ignore_eos,
        logprobs=kind if logprobs else "none",
        top_logprobs=top_logprobs if logprobs else 0,
        prompt_logprobs_start=score_from,
        prompt_top_logprobs=0 if score_from is None else top_logprobs,
        chosen_positions_start=chosen_from,
    )
