"""vLLM's `sampling_params`, and what they are here. Pure.

Fields and defaults are as in vLLM's own `SamplingParams`. Called by `generate.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fdasync_http.fields import Table, Unserved, engine, ignored, not_served
from fdasync_http.sampling import SamplingBody

SAMPLING: Table = {
    "logprobs": engine("logprobs", "top_logprobs"),
    "prompt_logprobs": engine("prompt_logprobs_start", "prompt_top_logprobs"),
    "routed_experts_prompt_start": engine("start"),
    **ignored("the answer has one form", "detokenize", "output_kind", "flat_logprobs"),
    **ignored("the tokenizer of the checkpoint says so", "spaces_between_special_tokens"),
    **ignored("the engine's own matter", "skip_clone", "skip_reading_prefix_cache"),
    **ignored("tokens are sent as they are made", "stream_interval"),
    **not_served("give stop or logit_bias", "bad_words"),
    "allowed_token_ids": Unserved("give structured_outputs or logit_bias", ()),
    **not_served("give structured_outputs", "guided_decoding"),
    **not_served("no code of clients is run", "logits_processors"),
    "truncate_prompt_tokens": Unserved("a prompt that is too long is refused", ()),
    # renderers asks so for log-probs in a binary form, and reads JSON where it gets none
    "extra_args": Unserved(
        "no code of clients is run", ({}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False})
    ),
    "thinking_token_budget": Unserved("a model thinks as its prompt asks it to", (-1,)),
    **not_served("give stop", "repetition_detection"),
    **not_served("give logprobs", "logprob_token_ids"),
    **not_served("samples have no mark", "watermarking"),
    "best_of": Unserved("ask for n", (1,)),
    **not_served("beams are not searched", "use_beam_search"),
}  # fmt: skip


class Sampling(SamplingBody, frozen=True, kw_only=True):
    """The fields on the wire; see vLLM's documentation.

    Attributes:
        logprobs, prompt_logprobs: how many alternatives beside each token; None and false: no log-probs; true: one.
    """

    RULES: ClassVar[Table] = SAMPLING

    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    include_stop_str_in_output: bool = False
    routed_experts_prompt_start: int | None = None
    structured_outputs: dict[str, Any] | None = None
