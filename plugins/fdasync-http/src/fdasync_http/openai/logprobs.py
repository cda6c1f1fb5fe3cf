"""Log-probs in OpenAI's two forms: of completions and of chats. Pure.

A log-prob of minus infinity is -9999.0, vLLM's word for it: JSON has none. Called by `completions.py`, `chat.py` and
`chat_stream.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.engine.tokenizer import WithSpecials
from fdasync_http.prompt_scores import SLICE_TOKENS, finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync import Delta, Result, Sample, TopLogprobs
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync_http.front import Front

_MAX_NAMES = 4096
_COMPLETION = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenNames:
    """What tokens are called in log-probs: their own text, special ones included; or their ids.

    Args:
        as_ids: "token_id:N", for clients that read ids there; also where there is no tokenizer.
    """

    def __init__(self, front: Front, *, as_ids: bool) -> None:
        self._tokenizer: Tokenizer | None = None
        if front.tokenizer is not None and not as_ids:
            own = front.tokenizer
            self._tokenizer = own.with_specials() if isinstance(own, WithSpecials) else own
        self._names: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        """The name of a token."""
        name = self._names.get(token_id)
        if name is None:
            name = f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode([token_id])
            if len(self._names) < _MAX_NAMES:
                self._names[token_id] = name
        return name


def values_of(run: Sample | Delta) -> Sequence[float] | None:
    """The log-probs of a sample, or of what is new of it, of the kind that was asked for; None: none was."""
    values = run.processed_logprobs if run.raw_logprobs is None else run.raw_logprobs
    return None if values is None else [finite(value) for value in values]


def of_chat(run: Sample | Delta, names: TokenNames) -> dict[str, Any] | None:
    """`{"content": [...]}`, an entry for each token; None where none were asked for."""
    values = values_of(run)
    if values is None:
        return None
    return {
        "content": [
            {**_entry(names, token, value), "top_logprobs": _tops(names, top)}
            for token, value, top in zip(run.token_ids, values, _tops_of(run), strict=True)
        ]
    }


def of_completion(run: Sample | Delta, names: TokenNames, offset: int = 0) -> dict[str, Any] | None:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; None where none were asked for.

    Args:
        offset: characters of the names of the tokens before.
    """
    values = values_of(run)
    if values is None:
        return None
    return _completion(run.token_ids, values, _tops_of(run), names, offset)


async def of_echo(result: Result, names: TokenNames) -> dict[str, Any]:
    """The same of a prompt, which is scored from its first token on; that one has neither log-prob nor alternatives.
    Other requests run in between: a prompt may be long."""
    assert result.prompt_logprobs is not None
    values = [None if value != value else finite(value) for value in result.prompt_logprobs.tolist()]
    # of a request that was aborted, a part is scored
    tokens = result.prompt_token_ids[: len(values)]
    tops = result.prompt_top_logprobs or (None,) * len(values)
    told: dict[str, Any] = {name: [] for name in _COMPLETION}
    offset = 0
    for first in range(0, len(tokens), SLICE_TOKENS):
        run = slice(first, first + SLICE_TOKENS)
        more = _completion(tokens[run], values[run], tops[run], names, offset)
        join(told, more)
        offset += sum(map(len, more["tokens"]))
        await asyncio.sleep(0)
    return told


def join(told: dict[str, Any], more: dict[str, Any]) -> None:
    """Append log-probs of a completion to those of the tokens before."""
    for name in _COMPLETION:
        told[name] += more[name]


def _completion(
    token_ids: Sequence[int], values: Sequence[float | None], all_tops: Sequence[TopLogprobs | None],
    names: TokenNames, offset: int,
) -> dict[str, Any]:  # fmt: skip
    texts = [names.of(token) for token in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops: list[dict[str, float] | None] = []
    for text, value, top in zip(texts, values, all_tops, strict=True):
        if value is None:
            tops.append(None)
            continue
        # two tokens may have one text: the likelier one counts
        told = {text: value}
        if top is not None:
            for token, one in zip(top.token_ids, top.logprobs, strict=True):
                told.setdefault(names.of(token), finite(one))
        tops.append(told)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _tops_of(run: Sample | Delta) -> Sequence[TopLogprobs | None]:
    return run.top_logprobs or (None,) * len(run.token_ids)


def _tops(names: TokenNames, top: TopLogprobs | None) -> list[dict[str, Any]]:
    if top is None:
        return []
    return [_entry(names, token, finite(value)) for token, value in zip(top.token_ids, top.logprobs, strict=True)]


def _entry(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    name = names.of(token)
    return {"token": name, "logprob": value, "bytes": list(name.encode())}
