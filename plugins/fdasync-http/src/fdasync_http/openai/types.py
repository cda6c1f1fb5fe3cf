"""The bodies of OpenAI's paths, with the fields of SGLang's and vLLM's servers beside them. Pure.

A field that asks for something that is not served is refused by name, as is an unknown one. A field with the value null
counts as left out. Called by the other modules of this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fdasync_http.bodies import read_json
from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from starlette.requests import Request

    from fdasync_http.config import HttpConfig

# fields that change nothing in an answer here: bookkeeping of OpenAI's, and of engines that this one is not
_IGNORED = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "session_id", "stream_interval", "spaces_between_special_tokens", "stream_reasoning",
    "log_metrics", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "conversation_id", "skip_reading_prefix_cache",
))  # fmt: skip
# fields for which a value other than these asks for something that is not served
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (), "echo": (False,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1.0,),
    "functions": ([],), "function_call": ("none",), "audio": (), "modalities": (["text"],), "prediction": (),
    "web_search_options": (), "documents": ([],), "chat_template": (), "verbosity": ("medium",), "lora_path": ("",),
    "prompt_embeds": (), "mm_processor_kwargs": ({},), "kv_transfer_params": ({},), "vllm_xargs": ({},),
    "logits_processors": ([],), "allowed_token_ids": (), "bad_words": ([],), "logprob_token_ids": ([],),
    "thinking_token_budget": (), "repetition_detection": (), "truncate_prompt_tokens": (), "stop_regex": ("", []),
    "custom_params": ({},), "custom_logit_processor": (), "session_params": (), "return_hidden_states": (False,),
    "return_cached_tokens_details": (False,), "include_reasoning": (True,), "logprob_start_len": (-1,),
    "add_special_tokens": (),
}  # fmt: skip
_REASONS = {
    "structural_tag": "give response_format, structured_outputs, regex, ebnf or json_schema",
    "echo": "a conversation is not repeated; prompt_logprobs scores it",
    "functions": "functions are not served; give tools",
    "function_call": "functions are not served; give tools",
    "chat_template": "the checkpoint's own template is used; chat_template_kwargs sets its variables",
    "lora_path": "LoRA adapters are not served",
    "stop_regex": "stop patterns are not served; give stop",
}

T = TypeVar("T")


class StreamOptions(msgspec.Struct, frozen=True):
    """Of a stream.

    Attributes:
        include_usage: one more event, behind the last choice, has the usage.
        continuous_usage_stats: with `include_usage`: every other event has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that completions and chats share; see the documentation of OpenAI, of SGLang and of vLLM.

    Attributes:
        model: any name in SGLang's dialect, as its server takes them; in vLLM's one of this server's.
        return_routed_experts, routed_experts_start_len, return_indexer_topk, return_meta_info, no_stop_trim, extra_key,
            rid: SGLang's.
        routed_experts_prompt_start, include_stop_str_in_output, request_id: vLLM's.
        prompt_logprobs: vLLM's: how many alternatives beside each token of the prompt; None: no log-probs of it.
    """

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    cache_salt: str = ""
    extra_key: str = ""
    priority: int = 0
    request_id: str | None = None
    rid: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_meta_info: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool = False
    routed_experts_prompt_start: int | None = None
    prompt_logprobs: int | None = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """Of `/v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of either.
        logprobs: how many alternatives beside each token; None: no log-probs.
        echo: the answer begins with the prompt, and with its log-probs where `logprobs` asks for some. It may then ask
            for no new tokens.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; further fields are the template's.

    Attributes:
        name: of the function.
    """

    name: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`.

    Attributes:
        type: the one kind there is.
        function: see there.
    """

    function: ToolFunction
    type: str = "function"


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """Of `/v1/chat/completions`.

    Attributes:
        messages: the conversation; read by the checkpoint's template.
        input_ids: the tokens of the conversation; the template is not used then.
        logprobs, top_logprobs: whether tokens have log-probs, and how many alternatives.
        tools: JSON schemas of functions, for the template.
        tool_choice: "auto", "none", "required", or a function of `tools`.
        parallel_tool_calls: with a tool choice that forces calls: more than one may follow another.
        chat_template_kwargs, reasoning_effort: variables of the template.
        separate_reasoning: False: reasoning stays in the text.
    """

    messages: list[dict[str, Any]] = []
    input_ids: list[int] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    separate_reasoning: bool = True


async def read_known(request: Request, kind: type[T], config: HttpConfig) -> T:
    """The body of a request as a `kind`. Raises Refused (400), which names a field that is unknown, not served or
    wrong."""
    raw = await read_json(request, dict[str, msgspec.Raw], config)
    raw = {name: value for name, value in raw.items() if bytes(value) != b"null"}
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    for name in [name for name in raw if name not in known]:
        value = raw.pop(name)
        if name in _IGNORED:
            continue
        if name not in _UNSERVED:
            raise Refused(400, f"unknown field {name!r}", param=name, code="unknown_field")
        if msgspec.json.decode(value) not in _UNSERVED[name]:
            reason = _REASONS.get(name, "")
            words = f"{name} is not served: {reason}" if reason else f"{name} is not served"
            raise Refused(400, words, param=name, code="not_served")
    return converted(msgspec.json.encode(raw), kind)


def converted(body: bytes, kind: type[T], field: str = "") -> T:
    """JSON as a `kind`. Raises Refused (400), which names the field.

    Args:
        field: what the JSON is; "": the body.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `")
        # of a key, msgspec says "at `key` in `$.field`"
        path = f"{field}{place.rstrip('`').rpartition('$')[2]}".lstrip(".")
        raise Refused(400, f"{path}: {words}" if path else words, param=path, code="bad_input") from None
