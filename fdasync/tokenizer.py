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


_MAX_INCOMPLETE = 3
_MAX_TEXTLESS_TOKENS = 8


class IncrementalDecoder:
    """Text of a growing token list, without decoding it from the start each time.

    Text is given out once it cannot change any more: a trailing incomplete character is held back until
    the tokens that complete it arrive (or `flush`); what stands before it is not. Decoding starts a little before
    the new tokens, so that merges and spaces come out right (the offsets are those of the Hugging Face streamer).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0
        # characters of the window behind `_read` that were given out already
        self._given = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that has become final with these tokens; may be ""."""
        self._tokens.extend(token_ids)
        return self._take(final=False)

    def flush(self) -> str:
        """What was held back; the end of the text."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = len(self._tokenizer.decode(self._tokens[self._prefix : self._read]))
        window = self._tokenizer.decode(self._tokens[self._prefix :])[before:]
        stable = window
        if not final:
            # an incomplete character shows as one to three replacement characters at the end; more are no character
            while len(window) - len(stable) < _MAX_INCOMPLETE and stable.endswith("\ufffd"):
                stable = stable[:-1]
        text = stable[self._given :]
        if stable == window and window:
            self._prefix, self._read, self._given = self._read, len(self._tokens), 0
        else:
            self._given = max(self._given, len(stable))
            if not window and len(self._tokens) - self._read > _MAX_TEXTLESS_TOKENS:
                # special tokens have no text: do not decode them again and again
                del self._tokens[self._read :]
        return text
