"""OpenAI's own client on a live server, and a small tokenizer for chats."""

from __future__ import annotations

import json
import re
import string
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from openai import AsyncOpenAI

from fdasync.errors import BadInput, TokenizerFailed
from fdasync.testing import oracle_of, synthetic_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

VOCAB = 1000
TAGS = 'call tools as <tool_call>{"name": <name>, "arguments": <object>}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}


class ChatLetters:
    """A token for each printable character, from 0 on; tokens from 100 on are letters, or what `script` says.

    A conversation is "[tools]" and a "<role>content" for each message; "<assistant>" begins an answer.

    Args:
        script: texts of tokens.
        template: the text of the template.
        declares: answers are read as "(reasoning)content{"name": ..., "arguments": ...}", and an open brace cannot be.
    """

    def __init__(self, script: dict[int, str] | None = None, template: str = TAGS, *, declares: bool = False) -> None:
        self.script = script or {}
        self.template = template
        self.declares = declares
        self.asked: list[dict[str, Any]] = []

    def encode(self, text: str) -> list[int]:
        return [string.printable.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([self._text(token) for token in token_ids])

    def _text(self, token: int) -> str:
        own = string.printable[token] if token < len(string.printable) else string.ascii_lowercase[token % 26]
        return self.script.get(token, own)

    def chat_template(self, *, with_tools: bool = False) -> str:
        return self.template

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, template_kwargs: Any = None,
    ) -> list[int]:  # fmt: skip
        self.asked.append({"messages": messages, "tools": tools, "variables": dict(template_kwargs or {})})
        if any(message["role"] == "king" for message in messages):
            raise BadInput("messages", "the chat template refuses them: no kings")
        text = "".join([f"<{message['role']}>{message['content']}" for message in messages])
        if tools:
            text = f"[{' '.join(tool['function']['name'] for tool in tools)}]{text}"
        return self.encode(text + "<assistant>" * add_generation_prompt)

    def parse_response(self, token_ids: Any, prompt_token_ids: Any, *, tools: Any = None) -> dict[str, Any] | None:
        if not self.declares:
            return None
        text = self.decode(token_ids)
        reasoning, content = "", text
        if text.startswith("("):
            reasoning, _, content = text[1:].partition(")")
        content, brace, rest = content.partition("{")
        calls = []
        if brace:
            try:
                calls = [{"function": json.loads(one)} for one in re.split(r"(?<=}})(?={)", brace + rest)]
            except ValueError:
                raise TokenizerFailed("ChatLetters", "the answer cannot be read") from None
        return {"role": "assistant", "content": content, "thinking": reasoning, "tool_calls": calls}


class SpecialTags(ChatLetters):
    """The tags of tool calls are special tokens: they have text only where special tokens are asked for."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).replace("<tool_call>", "").replace("</tool_call>", "")

    def with_specials(self) -> ChatLetters:
        return ChatLetters(self.script)


class Scripted(NamedTuple):
    """A model that says what it is told, if it is asked with these parameters.

    Attributes:
        tokenizer: gives the tokens that it samples the texts.
        seed, stop_token_id: for the request.
        token_ids: that it samples.
    """

    tokenizer: ChatLetters
    seed: int
    stop_token_id: int
    token_ids: list[int]

    @property
    def sampling(self) -> dict[str, Any]:
        """For the `openai` client."""
        return {"seed": self.seed, "extra_body": {"stop_token_ids": [self.stop_token_id]}}


def scripted(pieces: Sequence[str], messages: Any = (USER,), tools: Any = None, **kwargs: Any) -> Scripted:
    """The model answers `messages` with these pieces, one for each token, and stops."""
    tokenizer = ChatLetters(**kwargs)
    prompt = tokenizer.apply_chat_template(list(messages), tools=tools)
    oracle = oracle_of(synthetic_config({"vocab_size": VOCAB}))
    for seed in range(10_000):
        tokens = oracle.generate(prompt, len(pieces) + 1, temperature=1.0, seed=seed, index=0, logit_bias={})
        # each token once, and none that prompts have
        if min(tokens) >= len(string.printable) and len(set(tokens)) == len(tokens):
            script = dict(zip(tokens, [*pieces, ""], strict=True))
            return Scripted(ChatLetters(script, **kwargs), seed, tokens[-1], list(tokens))
    raise AssertionError("no seed for this script")


@pytest.fixture
def chat_of(scene_of: Any) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """A scene whose server knows chats, and a client of it."""

    @asynccontextmanager
    async def make(
        kind: str = "engine", tokenizer: Any = None, client: Any = None, **config: Any
    ) -> AsyncIterator[tuple[Any, AsyncOpenAI]]:
        runner = {"vocab_size": VOCAB, **config.pop("runner", {})}
        async with scene_of(kind, tokenizer=tokenizer or ChatLetters(), runner=runner, **config) as scene:
            key = config.get("api_key", "none")
            settings = {"api_key": key, "max_retries": 0, "timeout": 20.0, **(client or {})}
            async with AsyncOpenAI(base_url=f"{scene.url}/v1", **settings) as openai:
                yield scene, openai

    return make


@pytest.fixture
async def chat(kind: str, chat_of: Any) -> AsyncIterator[tuple[Any, AsyncOpenAI]]:
    async with chat_of(kind) as made:
        yield made


@pytest.fixture
def special_tags() -> type[ChatLetters]:
    return SpecialTags


@pytest.fixture(name="scripted")
def _scripted() -> Callable[..., Scripted]:
    return scripted
