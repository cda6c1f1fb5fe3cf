"""What a body of SGLang's `/generate` asks of the engine: its prompts, parameters and options, checked.

Fields are those of SGLang's `GenerateReqInput`. Called by `generate.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.bodies import read_json
from fdasync_http.client_names import Names
from fdasync_http.failures import Refused
from fdasync_http.grammars import field_of
from fdasync_http.sglang.meta import first_row
from fdasync_http.sglang.sampling import Sampling, params_of
from fdasync_http.text import TextForm, prompt_tokens

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync import SamplingParams
    from fdasync.request import GenerateOptions
    from fdasync_http.client_names import Table
    from fdasync_http.front import Front

# values with which a field asks for nothing
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, -1)
# fields of engines that this one is not, whose values change nothing in an answer
_IGNORED = (
    "log_metrics", "session_id", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "http_worker_ipc", "routing_key", "external_trace_header", "validation_time",
    "received_time", "background", "conversation_id", "no_logs", "modalities", "bootstrap_pair_key", "decode_tp_size",
    "kv_router_hint", "custom_labels", "num_items_assigned", "encoder_urls",
    # SGLang's gateway adds it to every body
    "model",
)  # fmt: skip
# fields that ask for something that is not served
_UNSERVED = (
    "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "lora_id", "return_hidden_states",
    "token_ids_logprob", "return_sampling_mask", "custom_logit_processor", "session_params",
    "positional_embed_overrides", "need_wait_for_mm_inputs", "multi_item_delimiter", "return_entropy", "return_bytes",
    "multi_item_delimiter_indices", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "mm_hashes",
    "mm_content_hashes", "use_audio_in_video", "video_config", "images_config", "require_reasoning",
    "max_thinking_tokens", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch",
    "video_max_dynamic_patch",
)  # fmt: skip


# by the engine's field: those of the body that ask for it
_FIELDS: Table = {
    **{name: (f"sampling_params.{name}",) for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
        "stop", "stop_token_ids", "ignore_eos", "logit_bias",
    )},
    "max_tokens": ("sampling_params.max_new_tokens",),
    "min_tokens": ("sampling_params.min_new_tokens",),
    "seed": ("sampling_params.sampling_seed",),
    "prompt": ("text", "input_ids"),
    "logprobs": ("return_logprob",),
    "top_logprobs": ("top_logprobs_num",),
    "prompt_logprobs_start": ("logprob_start_len",),
    "prompt_top_logprobs": ("top_logprobs_num",),
    "request_id": ("rid",),
    "cache_salt": ("extra_key", "cache_salt"),
    "routing": ("return_routed_experts",),
    "start": ("routed_experts_start_len",),
    "chosen_positions_start": ("return_indexer_topk",),
}  # fmt: skip


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields on the wire; see SGLang's documentation. `_IGNORED` and `_UNSERVED` list others that it knows."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    top_logprobs_num: int | None = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool = False
    return_prompt_token_ids: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


_KNOWN = set(GenerateBody.__struct_fields__)


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
        start = body.logprob_start_len
        scores = bool(body.return_logprob) and start is not None and start >= 0
        self.scores_only = sampling.max_new_tokens == 0
        self.prompt = prompt
        self.body = body
        self.names = Names(_FIELDS, body, partial(field_of, sampling, where), where)
        self.params: SamplingParams = params_of(
            sampling,
            where=where,
            logprobs=bool(body.return_logprob),
            top_logprobs=body.top_logprobs_num or 0,
            score_from=start if scores else None,
            chosen_from=0 if body.return_indexer_topk else None,
            room_tokens=room,
        )
        self.options: GenerateOptions = {
            "request_id": rid,
            "priority": body.priority or 0,
            "routing": body.return_routed_experts,
            "aux": False,
            "start": first_row(prompt, body.routed_experts_start_len) if body.return_routed_experts else 0,
            "cache_salt": body.extra_key or body.cache_salt or "",
        }
        if body.return_routed_experts and not facts.captures_routing:
            raise Refused(400, "this engine captures no expert routing", param="return_routed_experts")
        self.form = TextForm(
            front,
            specials=sampling.skip_special_tokens is False,
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


async def read_generate(request: Request, front: Front) -> GenerateBody:
    """The body of a request. Raises Refused, which names a field that is unknown or not served."""
    raw = await read_json(request, dict[str, msgspec.Raw], front.config)
    for name in [name for name in raw if name not in _KNOWN]:
        value = msgspec.json.decode(raw.pop(name))
        if name in _IGNORED:
            continue
        if name in _UNSERVED:
            if value not in _EMPTY:
                raise Refused(400, f"{name} is not served", param=name, code="not_served")
            continue
        raise Refused(400, f"unknown field {name!r}", param=name, code="unknown_field")
    try:
        return msgspec.json.decode(msgspec.json.encode(raw), type=GenerateBody)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise Refused(400, f"{field}: {words}" if field else words, param=field, code="bad_input") from None
