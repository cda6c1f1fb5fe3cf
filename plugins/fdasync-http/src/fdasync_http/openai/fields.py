"""Fields of OpenAI's paths, with fields that SGLang's and vLLM's servers add: what they ask of the engine, what is
ignored and what is refused. Pure.

Sampling parameters stand in the body itself, so that an unknown field is refused. Called by `types.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_http.fields import Unserved, engine, ignored, not_served

if TYPE_CHECKING:
    from fdasync_http.fields import Table

_TEMPLATE = "the checkpoint's own template is used; chat_template_kwargs sets its variables"
_MEDIA = "images, sound and video are not read"
_THINKS = "a model thinks as its prompt asks it to"

FIELDS: Table = {
    "input_ids": engine("prompt"),
    "messages": engine("prompt"),
    "prompt": engine("prompt"),
    "max_completion_tokens": engine("max_tokens"),
    "max_tokens": engine("max_tokens"),
    "prompt_logprobs": engine("prompt_logprobs_start", "prompt_top_logprobs"),
    # a completion's is a number
    "logprobs": engine("logprobs", "top_logprobs", "prompt_top_logprobs"),
    "rid": engine("request_id"),
    "extra_key": engine("cache_salt"),
    "routed_experts_prompt_start": engine("routing", "start"),
    "return_routed_experts": engine("routing"),
    "routed_experts_start_len": engine("start"),
    "return_indexer_topk": engine("chosen_positions_start"),
    **ignored(
        "bookkeeping of the service", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "session_id", "conversation_id", "log_metrics", "custom_labels",
    ),
    **ignored(
        "the engine's own matter", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host",
        "bootstrap_port", "bootstrap_room", "skip_reading_prefix_cache", "ngram_corpus_id",
    ),
    **ignored("tokens are sent as they are made", "stream_interval", "stream_reasoning"),
    **ignored("the tokenizer of the checkpoint says so", "spaces_between_special_tokens"),
    **ignored("logprobs asks for them here", "return_logprob"),
    **ignored("one library keeps every format", "guided_decoding_backend", "guided_whitespace_pattern"),
    **ignored("there are no images", "images_config", "max_dynamic_patch", "min_dynamic_patch", "use_mrope"),
    **ignored("of vLLM's paths that render alone", "return_token_offsets", "return_mm_kwargs"),
    **ignored("nothing is cut off", "truncation_side"),
    **not_served("give response_format, structured_outputs, regex, ebnf or json_schema", "structural_tag"),
    "echo": Unserved("a conversation is not repeated; prompt_logprobs scores it"),
    **not_served("give prompt up to where the model goes on", "suffix"),
    **not_served("beams are not searched", "use_beam_search"),
    "length_penalty": Unserved("beams are not searched", (1.0,)),
    **not_served("give tools", "functions"),
    "function_call": Unserved("give tools", ("none",)),
    "modalities": Unserved("answers are text", (["text"],)),
    "verbosity": Unserved("a model says as much as its prompt asks it to", ("medium",)),
    **not_served("answers are text", "audio"),
    **not_served("nothing is known before", "prediction"),
    **not_served("nothing is looked up", "web_search_options"),
    **not_served(_TEMPLATE, "chat_template", "documents", "task"),
    **not_served("LoRA adapters are not served", "lora_path"),
    **not_served("give prompt", "prompt_embeds"),
    **not_served(_MEDIA, "mm_processor_kwargs", "media_io_kwargs", "use_audio_in_video"),
    **not_served("instances hand blocks to each other by themselves", "kv_transfer_params", "ec_transfer_params"),
    **not_served(
        "no code of clients is run", "vllm_xargs", "logits_processors", "custom_params", "custom_logit_processor"
    ),
    "allowed_token_ids": Unserved("give a format or logit_bias", ()),
    **not_served("give stop or logit_bias", "bad_words"),
    **not_served("give logprobs", "logprob_token_ids"),
    "logprob_start_len": Unserved("give prompt_logprobs", (-1,)),
    "thinking_token_budget": Unserved(_THINKS, (-1,)),
    "include_reasoning": Unserved("it is a part of the answer", (True,)),
    **not_served("give stop", "repetition_detection", "stop_regex"),
    "truncate_prompt_tokens": Unserved("a prompt that is too long is refused", ()),
    **not_served("send the whole conversation", "session_params"),
    **not_served("samples have no mark", "watermarking"),
    **not_served("an answer has no such part", "return_hidden_states", "return_cached_tokens_details"),
    **not_served("give return_token_ids", "return_prompt_token_ids", "return_prompt_text"),
}  # fmt: skip
#: of completions, which may repeat their prompt
COMPLETION_FIELDS: Table = {**FIELDS, "echo": engine("prompt_logprobs_start")}
