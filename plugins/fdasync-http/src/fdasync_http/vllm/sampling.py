"""vLLM's `sampling_params`, and what they are here. Pure.

Fields and defaults are as in vLLM's own `SamplingParams`. Called by `generate.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from fdasync_http.fields import Table, Unserved, engine, ignored, same, unserved

SAMPLING: Table = {
    **same(
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed", "n",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "logit_bias",
    ),
    "logprobs": engine("logprobs", "top_logprobs"),
    "prompt_logprobs": engine("prompt_logprobs_start", "prompt_top_logprobs"),
    "routed_experts_prompt_start": engine("start"),
    **ignored("the answer has one form", "detokenize", "output_kind", "flat_logprobs"),
    **ignored("the tokenizer of the checkpoint says so", "spaces_between_special_tokens"),
    **ignored("the engine's own matter", "skip_clone", "skip_reading_prefix_cache"),
    **ignored("tokens are sent as they are made", "stream_interval"),
    **unserved("give stop or logit_bias", "bad_words"),
    "allowed_token_ids": Unserved("give structured_outputs or logit_bias", ()),
    **unserved("give structured_outputs", "guided_decoding"),
    **unserved("no code of clients is run", "logits_processors"),
    "truncate_prompt_tokens": Unserved("a prompt that is too long is refused", ()),
    # renderers asks so for log-probs in a binary form, and reads JSON where it gets none
    "extra_args": Unserved(
        "no code of clients is run", ({}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False})
    ),
    "thinking_token_budget": Unserved("a model thinks as its prompt asks it to", (-1,)),
    **unserved("give stop", "repetition_detection"),
    **unserved("give logprobs", "logprob_token_ids"),
    **unserved("samples have no mark", "watermarking"),
    "best_of": Unserved("ask for n", (1,)),
    **unserved("beams are not searched", "use_beam_search"),
}  # fmt: skip


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields on the wire; see vLLM's documentation.

    Attributes:
        logprobs, prompt_logprobs: how many alternatives beside each token; None and false: no log-probs; true: one.
    """

    RULES: ClassVar[Table] = SAMPLING

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int | None] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    routed_experts_prompt_start: int | None = None
    structured_outputs: dict[str, Any] | None = None
