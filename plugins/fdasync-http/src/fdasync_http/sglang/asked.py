"""What a body of SGLang's `/generate` asks of the engine: its prompts, parameters and options, checked.

Fields and defaults are as in SGLang's own `GenerateReqInput`; its server takes any other key too. Called by
`generate.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fdasync_http.client_names import Names
from fdasync_http.failures import Refused
from fdasync_http.fields import Table, Unserved, asked_by, engine, not_served
from fdasync_http.grammars import field_of, grammar_of
from fdasync_http.sampling import params_of
from fdasync_http.sglang.meta import first_row
from fdasync_http.sglang.sampling import Sampling
from fdasync_http.text import TextForm, prompt_tokens

if TYPE_CHECKING:
    from fdasync import SamplingParams
    from fdasync.request import GenerateOptions, LogprobKind
    from fdasync_http.front import Front


_MEDIA = "images, sound and video are not read"

GENERATE: Table = {
    "text": engine("prompt"),
    "input_ids": engine("prompt"),
    "return_logprob": engine("logprobs"),
    "top_logprobs_num": engine("top_logprobs", "prompt_top_logprobs"),
    "logprob_start_len": engine("prompt_logprobs_start"),
    "rid": engine("request_id"),
    "extra_key": engine("cache_salt"),
    "cache_salt": engine("cache_salt"),
    "return_routed_experts": engine("routing"),
    "routed_experts_start_len": engine("start"),
    "return_indexer_topk": engine("chosen_positions_start"),
    **not_served(
        _MEDIA, "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes", "use_audio_in_video",
        "video_config", "images_config", "need_wait_for_mm_inputs", "max_dynamic_patch", "min_dynamic_patch",
        "image_max_dynamic_patch", "video_max_dynamic_patch",
    ),
    **not_served("give text or input_ids", "input_embeds", "positional_embed_overrides"),
    **not_served("LoRA adapters are not served", "lora_path", "lora_id"),
    **not_served("an answer has no such part", "return_hidden_states", "return_sampling_mask", "return_entropy",
               "return_bytes", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    **not_served("ask for top_logprobs_num", "token_ids_logprob"),
    **not_served("no code of clients is run", "custom_logit_processor"),
    **not_served("send the whole conversation", "session_params"),
    **not_served("send a request for each", "multi_item_delimiter", "multi_item_delimiter_indices"),
    **not_served("a model thinks as its prompt asks it to", "require_reasoning"),
    "max_thinking_tokens": Unserved("a model thinks as its prompt asks it to", (-1,)),
}  # fmt: skip


class GenerateBody(msgspec.Struct):
    """The fields on the wire; see SGLang's documentation."""

    RULES: ClassVar[Table] = GENERATE
    OBJECTS: ClassVar[Any] = {"sampling_params": Sampling}

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool = False
    return_prompt_token_ids: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class Asked:
    """One prompt of a body, checked.

    Attributes:
        prompt: text or token ids.
        params: of the engine.
        options: of the engine.
        body: as it came.
        names: of its fields in errors.
        form: how its text is made.
        scores_only: it asks for no new tokens.
    """

    def __init__(
        self, front: Front, body: GenerateBody, prompt: Any, sampling: Sampling, rid: str | None, where: str
    ) -> None:
        """`where`: what the sampling parameters stand in, with a dot."""
        facts = front.generator.facts()
        room = facts.max_context_tokens - (len(prompt) if isinstance(prompt, list) else 0)
        most = room if sampling.max_new_tokens is None else sampling.max_new_tokens
        if sampling.max_new_tokens is not None and most < 0:
            name = f"{where}max_new_tokens"
            raise Refused(400, f"{most} is too small (limit: at least 0)", param=name)
        self.scores_only = sampling.max_new_tokens == 0
        self.prompt = prompt
        self.body = body
        self.names = Names(asked_by(type(body)), body, partial(field_of, sampling, where), where)
        score_from = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        # of the distribution that was sampled from, as SGLang's are; without randomness they are the model's own
        kind: LogprobKind = "raw" if sampling.temperature == 0 else "processed"
        self.params: SamplingParams = params_of(
            sampling,
            # a request without new tokens scores its prompt; the one token that it makes is not given out
            max_tokens=max(most, 1),
            grammar=grammar_of(sampling, where),
            logprobs=kind if body.return_logprob else "none",
            top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
            prompt_logprobs_start=score_from,
            prompt_top_logprobs=0 if score_from is None else body.top_logprobs_num,
            chosen_positions_start=0 if body.return_indexer_topk else None,
        )
        self.options: GenerateOptions = {
            "request_id": rid,
            "priority": body.priority,
            "routing": body.return_routed_experts,
            "aux": False,
            "start": first_row(prompt, body.routed_experts_start_len) if body.return_routed_experts else 0,
            "cache_salt": body.extra_key or body.cache_salt or "",
        }
        if body.return_routed_experts and not facts.captures_routing:
            raise Refused(400, "this engine captures no expert routing", param="return_routed_experts")
        self.form = TextForm(
            front,
            specials=not sampling.skip_special_tokens,
            keeps_stop=sampling.no_stop_trim,
            stop=self.params.stop,
        )


def asked_of(front: Front, body: GenerateBody) -> tuple[list[Asked], bool]:
    """The prompts of a body, and whether it asks for a list of answers. Raises Refused."""
    prompts: list[Any]
    if (body.text is None) == (body.input_ids is None):
        raise Refused(400, "one of text and input_ids is needed", param="input_ids")
    if body.text is not None:
        many = isinstance(body.text, list)
        prompts = list(body.text) if isinstance(body.text, list) else [body.text]
    else:
        assert body.input_ids is not None
        many = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        prompts = list(body.input_ids) if many else [body.input_ids]
        if any(isinstance(prompt, list) is not True for prompt in prompts):
            raise Refused(400, "input_ids mixes ids and lists of ids", param="input_ids")
    if not prompts:
        raise Refused(400, "no prompts", param="input_ids")
    samplings = body.sampling_params or Sampling()
    rids = body.rid
    if isinstance(samplings, list) and len(samplings) != len(prompts):
        raise Refused(400, f"{len(samplings)} sampling_params for {len(prompts)} prompts", param="sampling_params")
    if isinstance(rids, list) and len(rids) != len(prompts):
        raise Refused(400, f"{len(rids)} rids for {len(prompts)} prompts", param="rid")
    asked = []
    for number, prompt in enumerate(prompts):
        sampling = samplings[number] if isinstance(samplings, list) else samplings
        rid = rids[number] if isinstance(rids, list) else rids
        if many and isinstance(rids, str):
            rid = f"{rids}_{number}"
        if isinstance(prompt, str) and sampling.max_new_tokens is None:
            # what the context leaves is known with its tokens
            prompt = prompt_tokens(front, "text", prompt)
        where = f"sampling_params[{number}]." if isinstance(samplings, list) else "sampling_params."
        asked.append(Asked(front, body, prompt, sampling, rid, where))
    return asked, many
