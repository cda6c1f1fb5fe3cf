"""Log-probs in OpenAI's two forms, of completions and of chats, and what tokens are called in log-probs. Pure.

A log-prob of minus infinity is -9999.0, vLLM's word for it: JSON has none. Called by `completions.py`, `chat.py`,
`chat_stream.py` and, for names, by other rooms.
"""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any

from fdasync.engine.tokenizer import TokenKinds, WithPieces, WithSpecials
from fdasync_http.prompt_scores import SLICE_TOKENS, finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync import Delta, Result, Sample, TopLogprobs
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync_http.front import Front

_MAX_NAMES = 1 << 16
_COMPLETION = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenNames:
    """What tokens are called in log-probs: the text that each puts behind other text, special ones' included; or their
    ids.

    Args:
        as_ids: "token_id:N", for clients that read ids there; also where there is no tokenizer.

    Attributes:
        as_ids: see there.
    """

    def __init__(self, front: Front, *, as_ids: bool) -> None:
        own: Tokenizer | None = front.tokenizer
        self.as_ids = as_ids or own is None
        self._kinds: TokenKinds | None = None
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._piece: Callable[[int], bytes] | None = None
        if own is not None:
            self._kinds = TokenKinds(own)
            shown: Tokenizer = own.with_specials() if isinstance(own, WithSpecials) else own
            self._decode = shown.decode
            # which has the text of special tokens by itself
            if isinstance(own, WithPieces):
                self._piece = own.piece
        self._pieces: dict[int, bytes] = {}

    def of(self, token_id: int) -> str:
        """The name of a token. A part of a character is `bytes:\\xe2\\x80`, as OpenAI has it, so that parts differ."""
        piece = b"" if self.as_ids else self.piece(token_id)
        try:
            return piece.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in piece])

    def bytes_of(self, token_id: int) -> bytes:
        """OpenAI's `bytes` of a token: the bytes of its text. Tokens that are parts of a character make it together."""
        return self.of(token_id).encode() if self.as_ids else self.piece(token_id)

    def text(self, token_id: int) -> str:
        """The text of a token; a part of a character is U+FFFD. An id, where names are ids."""
        return self.of(token_id) if self.as_ids else self.piece(token_id).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        """What a token puts into a text behind other text; of nothing, where there is no tokenizer."""
        piece = self._pieces.get(token_id)
        if piece is None:
            if self._piece is not None:
                piece = self._piece(token_id)
            else:
                piece = b"" if self._decode is None else self._decode([token_id]).encode()
            if len(self._pieces) < _MAX_NAMES:
                self._pieces[token_id] = piece
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token, which a text without them leaves out."""
        return self._kinds is not None and bool(self._kinds.special_text(token_id))

    def drops_space(self, token_id: int) -> bool:
        """Whether a text that begins with this token has not the space that the token begins with."""
        begins = self._decode is not None and self.piece(token_id).startswith(b" ")
        return begins and self._decode is not None and not self._decode([token_id]).startswith(" ")


def spaced(text: str, token_ids: Sequence[int], names: TokenNames, *, specials: bool) -> str:
    """A text that stands behind another one, or is to be cut by its tokens: with the space that a decoder dropped at
    its start. `specials`: the text has that of special tokens."""
    seen = (token for token in token_ids if names.piece(token) and (specials or not names.is_special(token)))
    first = next(seen, None)
    dropped = first is not None and bool(text) and not text.startswith(" ") and names.drops_space(first)
    return f" {text}" if dropped else text


class TextOffsets:
    """Where the text of each token begins, in a text that grows.

    Args:
        specials: the text has that of special tokens.
        spaced: it has the space that its first token begins with.
        first: characters before it.
        within: the whole text, where it is known: special tokens are where it has them, as a client wrote them.

    Attributes:
        specials: see there.
    """

    def __init__(
        self, names: TokenNames, *, specials: bool = False, spaced: bool = False, first: int = 0, within: str = ""
    ) -> None:
        self._names = names
        self.specials = specials
        self._within = within
        self._begun = spaced
        self._at = first
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> int:
        """The offset of the next token."""
        at, names = self._at, self._names
        piece = names.piece(token_id)
        is_shown = self.specials or self._within.startswith(piece.decode(errors="replace"), at)
        if not is_shown and names.is_special(token_id):
            return at
        self._at += len(self._decoder.decode(piece))
        if piece and not self._begun:
            self._begun = True
            self._at -= names.drops_space(token_id)
        return at


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


def of_completion(run: Sample | Delta, names: TokenNames, offsets: TextOffsets) -> dict[str, Any] | None:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; None where none were asked for. `offsets`: of the
    text that these tokens go on with."""
    values = values_of(run)
    if values is None:
        return None
    return _completion(run.token_ids, values, _tops_of(run), names, offsets)


async def of_echo(result: Result, names: TokenNames, offsets: TextOffsets) -> dict[str, Any]:
    """The same of a prompt, which is scored from its first token on; that one has neither log-prob nor alternatives.
    Other requests run in between: a prompt may be long."""
    assert result.prompt_logprobs is not None
    values = [None if value != value else finite(value) for value in result.prompt_logprobs.tolist()]
    # of a request that was aborted, a part is scored
    tokens = result.prompt_token_ids[: len(values)]
    tops = result.prompt_top_logprobs or (None,) * len(values)
    told: dict[str, Any] = {name: [] for name in _COMPLETION}
    for first in range(0, len(tokens), SLICE_TOKENS):
        run = slice(first, first + SLICE_TOKENS)
        join(told, _completion(tokens[run], values[run], tops[run], names, offsets))
        await asyncio.sleep(0)
    return told


def join(told: dict[str, Any], more: dict[str, Any]) -> None:
    """Append log-probs of a completion to the log-probs of the tokens before."""
    for name in _COMPLETION:
        told[name] += more[name]


def _completion(
    token_ids: Sequence[int], values: Sequence[float | None], all_tops: Sequence[TopLogprobs | None],
    names: TokenNames, offsets: TextOffsets,
) -> dict[str, Any]:  # fmt: skip
    texts = [names.of(token) for token in token_ids]
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
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [offsets.add(token) for token in token_ids],
    }


def _tops_of(run: Sample | Delta) -> Sequence[TopLogprobs | None]:
    return run.top_logprobs or (None,) * len(run.token_ids)


def _tops(names: TokenNames, top: TopLogprobs | None) -> list[dict[str, Any]]:
    if top is None:
        return []
    return [_entry(names, token, finite(value)) for token, value in zip(top.token_ids, top.logprobs, strict=True)]


def _entry(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    return {"token": names.of(token), "logprob": value, "bytes": list(names.bytes_of(token))}
