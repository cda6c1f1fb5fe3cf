"""The body of `/v1/messages`, and its fields that are not served. Pure."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from fdasync_http.fields import Table, Unserved, ignored, not_served
from fdasync_http.openai.types import Extras

_KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

_AS_IT_IS = "a conversation is taken as it is"

FIELDS: Table = {
    **ignored(
        "bookkeeping of the service", "metadata", "service_tier", "inference_geo", "speed", "diagnostics",
        "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token",
    ),
    **ignored("blocks are found in the cache whether they are marked or not", "cache_control"),
    **ignored("this server refuses no answer", "fallbacks"),
    **not_served("there are no containers", "container"),
    **not_served("tools are called by the client", "mcp_servers"),
    "context_management": Unserved(_AS_IT_IS, ({}, {"edits": []}, _KEPT)),
    **not_served(_AS_IT_IS, "compaction"),
    "output_format": Unserved("give output_config.format", ()),
}  # fmt: skip

#: fields of Messages by the fields of chats, where the names differ
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


class Thinking(msgspec.Struct, frozen=True):
    """Whether to think.

    Attributes:
        type: "disabled" and "enabled" are told to the template; with the others it does as it does by itself.
        budget_tokens: not looked at: thinking counts towards `max_tokens`.
    """

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer shall be.

    Attributes:
        effort: a variable of the template.
        format: `json_schema` with a `schema`.
    """

    effort: str | float | None = None
    format: dict[str, Any] | None = None


class CountBody(Extras, frozen=True, kw_only=True):
    """Body of `/v1/messages/count_tokens`; see Anthropic's documentation.

    Attributes:
        model: any name in SGLang's dialect; in vLLM's one of this server's; see `unknown_models`.
        messages: the conversation; an assistant's message at its end is continued.
        system: text before it.
        tools: functions that the model may call.
        tool_choice: its `type` is `auto`, `none`, `any` or `tool`.
        thinking: whether to think.
        output_config: how the answer shall be.
        chat_template_kwargs: variables of the template.
        thread: not served.
    """

    RULES: ClassVar[Table] = FIELDS
    OBJECTS: ClassVar[Any] = {"thinking": Thinking, "output_config": OutputConfig}

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: dict[str, Any] = msgspec.field(default_factory=dict)
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    thread: Any = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """Body of `/v1/messages`; see Anthropic's documentation.

    Attributes:
        max_tokens: the most new tokens; the context may leave fewer.
        stop_sequences: texts at which the answer ends.
    """

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
