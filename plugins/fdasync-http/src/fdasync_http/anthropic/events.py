"""The events of a Message, in Anthropic's order, and the Message that they make. Called by `serve.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync_http.anthropic.envelope import error_of
from fdasync_http.translated.translation import Event, Kind, Translation

if TYPE_CHECKING:
    from fdasync import Result, Sample
    from fdasync_http.failures import Refused
    from fdasync_http.front import Front
    from fdasync_http.openai.chat import Prepared
    from fdasync_http.openai.tools import Call

_FIELDS = {"text": "text", "reasoning": "thinking"}


class MessageEvents(Translation):
    """See the module.

    Args:
        chat: whose answer it is.
        max_tokens: as it was asked for.
    """

    def __init__(self, front: Front, chat: Prepared, *, max_tokens: int) -> None:
        asked = chat.asked
        super().__init__({
            "id": asked.request_id,
            "type": "message",
            "role": "assistant",
            "model": asked.body.model or front.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # what of it comes from the cache is known at the end
            "usage": _usage(len(asked.prompt), 0, 0),
        })  # fmt: skip
        self._is_cut_by_context = asked.params.max_tokens < max_tokens
        self._text: list[str] = []

    def begin(self) -> list[Event]:
        return [{"type": "message_start", "message": {**self.answer, "content": []}}]

    def end(self, sample: Sample, result: Result) -> list[Event]:
        events = self._close()
        stop = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        usage = _usage(len(result.prompt_token_ids), result.usage.cached_tokens, len(sample.token_ids))
        ended = {"stop_reason": self._reason_of(sample, stop), "stop_sequence": stop}
        self.answer |= {**ended, "usage": usage}
        return [*events, {"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]

    def extras_of(self, event: Event) -> dict[str, Any] | None:
        return event if event["type"] == "message_delta" else None

    def failed(self, refused: Refused) -> Event:
        event: Event = msgspec.to_builtins(error_of(refused.status, refused.message, refused.code))
        return event

    def _reason_of(self, sample: Sample, stop: str | None) -> str:
        if sample.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_cut_by_context else "max_tokens"
        if sample.finish_reason != "stop":
            return "abort"
        if self.calls_tools:
            return "tool_use"
        return "end_turn" if stop is None else "stop_sequence"

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = self.answer["content"]
        return blocks

    @property
    def _at(self) -> int:
        return len(self._blocks) - 1

    def _begin(self, kind: Kind) -> list[Event]:
        self._text = []
        block = {"type": "text", "text": ""} if kind == "text" else _thinking("")
        self._blocks.append(block)
        return [{"type": "content_block_start", "index": self._at, "content_block": dict(block)}]

    def _grow(self, text: str) -> list[Event]:
        self._text.append(text)
        field = _FIELDS[self._open or "text"]
        return [{"type": "content_block_delta", "index": self._at, "delta": {"type": f"{field}_delta", field: text}}]

    def _end(self, kind: Kind) -> list[Event]:
        self._blocks[-1][_FIELDS[kind]] = "".join(self._text)
        return [{"type": "content_block_stop", "index": self._at}]

    def _call(self, call: Call) -> list[Event]:
        given = _object_of(call.arguments)
        block = {
            "type": "tool_use",
            "id": call.call_id.replace("call_", "toolu_", 1),
            "name": call.name,
            "input": given,
        }
        self._blocks.append(block)
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(given).decode()}
        return [{"type": "content_block_start", "index": self._at, "content_block": {**block, "input": {}}},
                {"type": "content_block_delta", "index": self._at, "delta": delta},
                {"type": "content_block_stop", "index": self._at}]  # fmt: skip


def _thinking(text: str) -> dict[str, Any]:
    # nothing is signed, since whatever comes back is taken
    return {"type": "thinking", "thinking": text, "signature": ""}


def _object_of(arguments: str) -> dict[str, Any]:
    """Arguments as the object that `input` is; what is none stands in one."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(prompt: int, cached: int, made: int) -> dict[str, int]:
    """`input_tokens` counts tokens that had to be computed: clients add the three up."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }
