"""`POST /tokenize` and `/detokenize`, as SGLang's and vLLM's servers have them. Called by `application.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fdasync.engine.tokenizer import WithPieces, WithSpecials
from fdasync_http.bodies import check_text_size, read_json
from fdasync_http.calls import reply
from fdasync_http.failures import Refused, wrong
from fdasync_http.fields import Table
from fdasync_http.openai.fields import FIELDS
from fdasync_http.openai.messages import tokens_of
from fdasync_http.text import encoded

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from fdasync.engine.tokenizer import Tokenizer
    from fdasync_http.front import Front


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/tokenize`.

    Attributes:
        model: not looked at.
        prompt, messages: one of the two.
        add_special_tokens: with the special tokens that the tokenizer puts around a text; None: a text gets them,
            messages do not: they have the template's.
        tools, add_generation_prompt, continue_final_message, chat_template_kwargs: as for a chat.
        return_token_strs: the text of each token, too.
    """

    RULES: ClassVar[Table] = FIELDS

    model: str = ""
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/detokenize`.

    Attributes:
        model: not looked at.
        tokens: one list of ids, or several.
        skip_special_tokens: None: in SGLang's dialect, as its server does; in vLLM's they are shown.
    """

    RULES: ClassVar[Table] = FIELDS

    model: str = ""
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


async def tokenize(request: Request, front: Front) -> Response:
    """`POST /tokenize`: tokens of a text or of a chat."""
    body = await read_json(request, TokenizeBody, front.config)
    tokenizer = _tokenizer(front)
    if (body.prompt is None) == (body.messages is None):
        raise wrong("prompt", "one of prompt and messages is needed")
    if body.messages is not None:
        told = [
            tokens_of(
                front,
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
                add_special_tokens=bool(body.add_special_tokens),
            )
        ]
    else:
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        check_text_size("prompt", "".join(prompts), front)
        adds = body.add_special_tokens is not False
        told = [encoded(tokenizer, prompt, add_special_tokens=adds) for prompt in prompts]
    names = [_spelled(tokenizer, token) for token in told[0]] if body.return_token_strs and told else None
    many = isinstance(body.prompt, list)
    return reply(
        {
            "tokens": told if many else told[0],
            "count": [len(tokens) for tokens in told] if many else len(told[0]),
            "max_model_len": front.generator.facts().max_context_tokens,
            "token_strs": names,
        }
    )


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.spelling(token) if isinstance(tokenizer, WithPieces) else tokenizer.decode([token])


async def detokenize(request: Request, front: Front) -> Response:
    """`POST /detokenize`: text of tokens."""
    body = await read_json(request, DetokenizeBody, front.config)
    tokenizer = _tokenizer(front)
    skips = front.config.dialect == "sglang" if body.skip_special_tokens is None else body.skip_special_tokens
    if not skips:
        if isinstance(tokenizer, WithSpecials):
            tokenizer = tokenizer.with_specials()
        elif body.skip_special_tokens is False:
            words = "this tokenizer has no text of them"
            raise Refused(400, words, param="skip_special_tokens", code="not_served")
    lists = [one for one in body.tokens if isinstance(one, list)]
    many = bool(lists)
    if many and len(lists) < len(body.tokens):
        raise wrong("tokens", "mixes token ids and lists")
    most = front.generator.facts().vocab_size
    texts = []
    for ids in lists or [[one for one in body.tokens if isinstance(one, int)]]:
        bad = next((token for token in ids if not 0 <= token < most), None)
        if bad is not None:
            raise wrong("tokens", f"{bad} is outside the vocabulary; the limit is {most - 1}")
        texts.append(tokenizer.decode(ids))
    text = texts if many else texts[0]
    # vLLM's name for it, and SGLang's
    return reply({"prompt": text, "text": text})


def _tokenizer(front: Front) -> Tokenizer:
    if front.tokenizer is None:
        raise Refused(400, "this server has no tokenizer", code="not_served")
    return front.tokenizer
