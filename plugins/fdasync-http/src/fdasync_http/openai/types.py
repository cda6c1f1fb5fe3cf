"""The bodies of OpenAI's paths, with the fields of SGLang's and vLLM's servers beside them. Pure.

`fields.py` has the table beside them. Called by the other modules of this room.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from fdasync_http.failures import wrong
from fdasync_http.fields import Table
from fdasync_http.openai.fields import COMPLETION_FIELDS, FIELDS
from fdasync_http.sampling import Sampled

T = TypeVar("T")


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream.

    Attributes:
        include_usage: one more event, behind the last choice, has the usage.
        continuous_usage_stats: with `include_usage`: every other event has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Extras(Sampled, frozen=True, kw_only=True):
    """Fields of SGLang's and vLLM's servers that dialects take, too, which are translated into chats.

    Attributes:
        return_meta_info, return_routed_experts, routed_experts_start_len, extra_key, rid: SGLang's.
        routed_experts_prompt_start, request_id: vLLM's.
        return_token_ids: as what the others ask for, tokens stand beside the dialect's own fields, in a stream in its
            last event that tells how the answer ended.
    """

    seed: int | None = None
    min_tokens: int = 0
    cache_salt: str = ""
    extra_key: str = ""
    priority: int = 0
    request_id: str | None = None
    rid: str | None = None
    return_token_ids: bool = False
    return_meta_info: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int | None = None
    routed_experts_prompt_start: int | None = None


class CommonBody(Extras, frozen=True, kw_only=True):
    """Fields that completions and chats share; see the documentation of OpenAI, of SGLang and of vLLM.

    Attributes:
        model: any name in SGLang's dialect; in vLLM's one of this server's; see `unknown_models`.
        return_indexer_topk, no_stop_trim: SGLang's.
        include_stop_str_in_output: vLLM's.
        prompt_logprobs: vLLM's: how many alternatives beside each token of the prompt; None: no log-probs of it.
    """

    RULES: ClassVar[Table] = FIELDS
    OBJECTS: ClassVar[Any] = {"stream_options": StreamOptions}

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
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
    return_tokens_as_token_ids: bool = False
    return_indexer_topk: bool = False
    prompt_logprobs: int | None = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """Body of `/v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of either.
        logprobs: how many alternatives beside each token; None and false: no log-probs; true: one.
        echo: the answer begins with the prompt, and with its log-probs where `logprobs` asks for some. It may then ask
            for no new tokens.
        add_special_tokens: False: the tokenizer puts no special tokens around a prompt of text.
    """

    RULES: ClassVar[Table] = COMPLETION_FIELDS

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None
    add_special_tokens: bool = True
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
        type: "function", the one kind there is, or None.
        function: see there.
    """

    function: ToolFunction
    type: str | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How a model shall think.

    Attributes:
        effort: as `reasoning_effort`, which it goes before.
        enabled: False: not at all.
    """

    effort: str | float | None = None
    enabled: bool | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`.

    Attributes:
        messages: the conversation; read by the checkpoint's template.
        input_ids: the tokens of the conversation; the template is not used then.
        logprobs, top_logprobs: whether tokens have log-probs, and how many alternatives.
        tools: JSON schemas of functions, for the template.
        tool_choice: "auto", "none", "required", or a function of `tools`.
        parallel_tool_calls: with a tool choice that forces calls: more than one may follow another.
        chat_template_kwargs: variables of the template.
        reasoning_effort: one more; "none" switches thinking off.
        reasoning: the same as an object, as SGLang reads it.
        add_special_tokens: the tokenizer puts its own around what the template makes.
        separate_reasoning: False: reasoning stays in the text.
    """

    OBJECTS: ClassVar[Any] = {**CommonBody.OBJECTS, "reasoning": Reasoning}

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    input_ids: list[int] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    reasoning_effort: str | float | None = None
    reasoning: Reasoning = Reasoning()
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    separate_reasoning: bool = True


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
        raise wrong(path, words) from None
