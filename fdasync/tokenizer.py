"""What the engine needs of a tokenizer, and incremental decoding on top of it.

Plugins register a factory under `fdasync.tokenizers`: a callable that takes the model folder and
returns a `Tokenizer`. Used by `prepare.py` (encode) and `output.py` (decode); without one the engine is
tokens in, tokens out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer(Protocol):
    """Text to token ids and back. Both calls are pure and may be made from any process."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects at its start."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out. Incomplete UTF-8 becomes U+FFFD."""
        ...


class IncrementalDecoder:
    """Text of a growing token list, without decoding it from the start each time.

    Text is given out once it cannot change any more: a trailing incomplete character is held back until
    the tokens that complete it arrive (or `flush`). The two offsets are those of the Hugging Face
    streamer: decode from a little before the new tokens, so that merges and spaces come out right.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that has become final with these tokens; may be ""."""
        self._tokens.extend(token_ids)
        return self._take(final=False)

    def flush(self) -> str:
        """What was held back; the end of the text."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._prefix : self._read])
        after = self._tokenizer.decode(self._tokens[self._prefix :])
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return after[len(before) :]
