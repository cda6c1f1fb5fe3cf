"""Calls a server through `litellm`, as agent frameworks do, and prints one JSON object of what came.

Run by `test_litellm.py` with the Python of litellm's own environment: `litellm_client.py BASE_URL CASE [JSON]`.
"""

from __future__ import annotations

import json
import sys

import litellm

USER = {"role": "user", "content": "hi"}


def chat(base: str, given: dict) -> dict:
    made = litellm.completion(model="openai/synthetic", messages=[USER], api_base=base, api_key="none", **given)
    choice = made.choices[0]
    return {
        "content": choice.message.content,
        "finish_reason": choice.finish_reason,
        "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
        "tokens": made.usage.completion_tokens,
        "choices": len(made.choices),
        "logprobs": [one.token for one in choice.logprobs.content] if getattr(choice, "logprobs", None) else [],
    }


def stream(base: str, given: dict) -> dict:
    chunks = list(
        litellm.completion(
            model="openai/synthetic", messages=[USER], api_base=base, api_key="none", stream=True,
            stream_options={"include_usage": True}, **given,
        )
    )  # fmt: skip
    whole = litellm.stream_chunk_builder(chunks, messages=[USER])
    choice = whole.choices[0]
    return {
        "content": choice.message.content,
        "finish_reason": choice.finish_reason,
        "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
        "tokens": whole.usage.completion_tokens,
        "chunks": len(chunks),
    }


def text(base: str, given: dict) -> dict:
    made = litellm.text_completion(model="text-completion-openai/synthetic", api_base=base, api_key="none", **given)
    return {"text": made.choices[0].text, "tokens": made.usage.completion_tokens}


def error(base: str, given: dict) -> dict:
    settings = {"model": "openai/synthetic", "messages": [USER], "api_base": base, "api_key": "none", "num_retries": 0}
    try:
        litellm.completion(**{**settings, "max_retries": 0, **given})
    except Exception as caught:
        return {"class": type(caught).__name__, "status": getattr(caught, "status_code", None), "words": str(caught)}
    return {"class": ""}


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    base_url, case, *rest = sys.argv[1:]
    cases = {"chat": chat, "stream": stream, "text": text, "error": error}
    print(json.dumps(cases[case](base_url, json.loads(rest[0]) if rest else {})))
