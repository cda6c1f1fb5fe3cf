"""The body of `/v1/responses`, and its fields that are not served. Pure."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from fdasync_http.fields import Table, Unserved, ignored, not_served
from fdasync_http.openai.types import Extras, StreamOptions

_KEEPS_NOTHING = "nothing is kept of a request; give the whole conversation as input"

_WAITS = "a request is answered while its client waits"
_AS_IT_IS = "a conversation is taken as it is"

FIELDS: Table = {
    # without `store`, too, nothing is kept
    **ignored(
        "bookkeeping of the service", "store", "user", "safety_identifier", "service_tier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "access_programs", "client_metadata",
    ),
    **ignored("there are no tools of the server's own", "max_tool_calls"),
    "previous_response_id": Unserved(_KEEPS_NOTHING, ()),
    "conversation": Unserved(_KEEPS_NOTHING, ()),
    **not_served(_WAITS, "background", "background_options"),
    **not_served("no prompts are kept here; give instructions and input", "prompt"),
    "truncation": Unserved("a conversation that is too long is refused", ("disabled",)),
    **not_served(_AS_IT_IS, "context_management"),
    **not_served("nothing is moderated", "moderation"),
    **not_served("images are not read", "image"),
    "n": Unserved("there is one answer; ask again for another", (1,)),
    **not_served("Responses have no stop sequences; /v1/chat/completions and /v1/messages do", "stop"),
}  # fmt: skip

#: fields of Responses by the fields of chats, where the names differ
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class Reasoning(msgspec.Struct, frozen=True):
    """How to reason; other keys change nothing.

    Attributes:
        effort: a variable of the template.
    """

    effort: str | float | None = None


class Text(msgspec.Struct, frozen=True):
    """How the text shall be.

    Attributes:
        format: `text`, `json_object`, or `json_schema` with a `schema`.
        verbosity: the one kind there is.
    """

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Extras, frozen=True, kw_only=True):
    """Body of `/v1/responses`; see OpenAI's documentation. Nothing is kept of an answer.

    Attributes:
        model: any name in SGLang's dialect; in vLLM's one of this server's; see `unknown_models`.
        input: a user's text, or items: messages, function calls and their outputs, reasoning.
        instructions: a system message before it.
        max_output_tokens: the most new tokens; the context may leave fewer.
        tools: functions that the model may call.
        tool_choice: "auto", "none", "required", or a function.
        parallel_tool_calls: with a tool choice that forces calls: more than one may follow another.
        text: the format of the answer.
        reasoning: how to reason.
        chat_template_kwargs: variables of the template.
        include: of what there is, `message.output_text.logprobs` changes an answer.
        top_logprobs: how many alternatives the log-probs have; above 0 they need no `include`.
        metadata: told again in the answer.
        stream_options: changes nothing.
    """

    RULES: ClassVar[Table] = FIELDS
    OBJECTS: ClassVar[Any] = {"stream_options": StreamOptions, "text": Text, "reasoning": Reasoning}

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: Text = Text()
    reasoning: Reasoning = Reasoning()
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    include: list[str] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
