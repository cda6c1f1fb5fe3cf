"""The events of a Response, in OpenAI's order, and the Response that they make. Called by `serve.py`."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from fdasync_http.text import encoded
from fdasync_http.translated.translation import Event, Kind, Translation

if TYPE_CHECKING:
    from fdasync import Result, Sample
    from fdasync_http.failures import Refused
    from fdasync_http.front import Front
    from fdasync_http.openai.tools import Call

# of a part's events, and its own type
_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponseEvents(Translation):
    """See the module.

    Args:
        response: the fields of the Response that are known before it begins.
    """

    def __init__(self, front: Front, response: dict[str, Any]) -> None:
        super().__init__(response)
        self._front = front
        self._number = 0
        # of the part that ends next
        self._status = "completed"
        self._text: list[str] = []
        self._reasoning: list[str] = []
        # of the open text, and of tokens whose text has not come yet; reasoning's tokens are among them, as in a chat
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []

    def begin(self) -> list[Event]:
        return [self._event("response.created", response=self._so_far()),
                self._event("response.in_progress", response=self._so_far())]  # fmt: skip

    def end(self, sample: Sample, result: Result) -> list[Event]:
        events = [] if self._output or self._open else self._open_as("text")
        if sample.finish_reason == "stop":
            self.answer["completed_at"] = int(time.time())
        else:
            # the part that was cut says so, as the whole does
            self._status = "incomplete"
            reason = "max_output_tokens" if sample.finish_reason == "length" else "abort"
            self.answer["incomplete_details"] = {"reason": reason}
        events += self._close()
        self.answer["status"] = self._status
        self.answer["usage"] = self._usage_of(result)
        return [*events, self._event(f"response.{self._status}", response=self.answer)]

    def extras_of(self, event: Event) -> dict[str, Any] | None:
        return self.answer if event.get("response") is self.answer else None

    def failed(self, refused: Refused) -> Event:
        told = {"code": refused.code or None, "message": refused.message, "param": refused.param or None}
        # OpenAI's client raises what it finds under `error`
        return self._event("error", **told, error={**told, "type": "server_error"})

    @property
    def _output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.answer["output"]
        return output

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _so_far(self) -> dict[str, Any]:
        return {**self.answer, "output": []}

    def _take(self, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._waiting += logprobs
        return []

    def _begin(self, kind: Kind) -> list[Event]:
        self._text = []
        if kind == "text":
            item = {"id": _name("msg"), "type": "message", "role": "assistant", "content": [], "status": "in_progress"}
        else:
            item = {"id": _name("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        self._output.append(item)
        return [self._event("response.output_item.added", output_index=self._at, item=dict(item, content=[])),
                self._event("response.content_part.added", **self._place, part=self._part(kind, "", []))]  # fmt: skip

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        self._text.append(text)
        if self._open == "reasoning":
            self._reasoning.append(text)
            return [self._event("response.reasoning_text.delta", **self._place, delta=text)]
        told, self._waiting = self._waiting, []
        self._logprobs += told
        return [self._event("response.output_text.delta", **self._place, delta=text, logprobs=told)]

    def _end(self, kind: Kind) -> list[Event]:
        text = "".join(self._text)
        told: dict[str, Any] = {"text": text}
        logprobs: list[dict[str, Any]] = []
        if kind == "text":
            logprobs, self._logprobs, self._waiting = [*self._logprobs, *self._waiting], [], []
            told["logprobs"] = logprobs
        part = self._part(kind, text, logprobs)
        place = self._place
        item = self._output[-1]
        item |= {"content": [part], "status": self._status}
        return [self._event(f"{_EVENTS[kind]}.done", **place, **told),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=self._at, item=item)]  # fmt: skip

    def _call(self, call: Call) -> list[Event]:
        item = {"id": _name("fc"), "type": "function_call", "call_id": call.call_id, "name": call.name,
                "arguments": "", "status": "in_progress"}  # fmt: skip
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._output.append(done)
        place = {"item_id": item["id"], "output_index": self._at}
        return [self._event("response.output_item.added", output_index=self._at, item=item),
                self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._event("response.function_call_arguments.done", **place,
                            arguments=call.arguments),
                self._event("response.output_item.done", output_index=self._at, item=done)]  # fmt: skip

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": self._at, "content_index": 0}

    def _part(self, kind: Kind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
        return {**part, "annotations": [], "logprobs": logprobs} if kind == "text" else part

    def _usage_of(self, result: Result) -> dict[str, Any]:
        prompt, made = len(result.prompt_token_ids), result.usage.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": result.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": prompt + made,
        }

    def _reasoning_tokens(self) -> int:
        """Tokens of its text, encoded again: the engine does not tell which of the tokens were reasoning."""
        text = "".join(self._reasoning)
        return len(encoded(self._front.tokenizer, text)) if text and self._front.tokenizer is not None else 0


def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
