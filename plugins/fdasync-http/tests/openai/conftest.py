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
    """A token for each printable character, from 0 on, and the last one for all others; tokens from 100 on are letters,
    or what `script` says.

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
        return [string.printable.find(letter) % len(string.printable) for letter in text]

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
        seed: for the request.
        token_ids: that it samples, turn by turn; the last one of each turn stops it.
    """

    tokenizer: ChatLetters
    seed: int
    token_ids: list[list[int]]

    @property
    def stop_token_ids(self) -> list[int]:
        """For the request."""
        return [tokens[-1] for tokens in self.token_ids]

    @property
    def more(self) -> dict[str, Any]:
        """For clients that take further fields of a body."""
        return {"seed": self.seed, "stop_token_ids": self.stop_token_ids}

    @property
    def sampling(self) -> dict[str, Any]:
        """For chats and completions of the `openai` client."""
        return {"seed": self.seed, "extra_body": {"stop_token_ids": self.stop_token_ids}}


def scripted(pieces: Sequence[str], messages: Any = (USER,), tools: Any = None, **kwargs: Any) -> Scripted:
    """The model answers `messages` with these pieces, one for each token, and stops."""
    return scripted_turns([(pieces, messages)], tools=tools, **kwargs)


def scripted_turns(turns: Sequence[tuple[Sequence[str], Any]], tools: Any = None, **kwargs: Any) -> Scripted:
    """As `scripted`, for several conversations: pieces, and the messages that they answer."""
    tokenizer = ChatLetters(**kwargs)
    prompts = [tokenizer.apply_chat_template(list(messages), tools=tools) for _, messages in turns]
    oracle = oracle_of(synthetic_config({"vocab_size": VOCAB}))
    for seed in range(10_000):
        said = [
            list(oracle.generate(prompt, len(pieces) + 1, temperature=1.0, seed=seed, index=0, logit_bias={}))
            for prompt, (pieces, _) in zip(prompts, turns, strict=True)
        ]
        tokens = [token for one in said for token in one]
        # each token once, and none that prompts have
        if min(tokens) >= len(string.printable) and len(set(tokens)) == len(tokens):
            texts = [text for pieces, _ in turns for text in (*pieces, "")]
            return Scripted(ChatLetters(dict(zip(tokens, texts, strict=True)), **kwargs), seed, said)
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
            settings = {"api_key": key, "max_retries": 0, "timeout": 300.0, **(client or {})}
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


@pytest.fixture(name="scripted_turns")
def _scripted_turns() -> Callable[..., Scripted]:
    return scripted_turns


@pytest.fixture(name="scripted")
def _scripted() -> Callable[..., Scripted]:
    return scripted
