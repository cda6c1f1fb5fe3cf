"""What one token of a library's tokenizer puts into a text, as bytes.

A decoder drops a space at the start of a text and cannot show a part of a character. So a token is decoded behind a
letter, and where that has no whole characters, its bytes are read from its spelling in the vocabulary: of byte-level
vocabularies a letter for each byte, of those with a byte fallback `<0xE4>`. Called by `tokenizer.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LETTER = "a"
_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: a byte that is no visible letter of Latin-1 has one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


class Pieces:
    """See the module.

    Args:
        encode: tokens of a text, without special tokens around it.
        decode: text of tokens, special ones included.
        spelling: of a token in the vocabulary; None: the vocabulary has no such id.
        added: by id, the text of tokens that were added to the vocabulary.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
        spelling: Callable[[int], str | None],
        added: Mapping[int, str],
    ) -> None:
        self._decode = decode
        self._spelling = spelling
        self._added = added
        self._before = list(encode(_LETTER))
        self._letter = decode(self._before)

    def of(self, token_id: int) -> bytes:
        """Of one token; b"" for an id without one."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        spelling = self._spelling(token_id)
        if spelling is None:
            return b""
        text = self._decode([*self._before, token_id])
        # bytes may join the letter's, where that is spelled in bytes
        own = text[len(self._letter) :] if text.startswith(self._letter) else self._decode([token_id])
        return own.encode() if _REPLACEMENT not in own else _bytes_of(spelling) or own.encode()


def _bytes_of(spelling: str) -> bytes:
    """The bytes that a spelling stands for; b"": it stands for no bytes."""
    fallback = _FALLBACK.fullmatch(spelling)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    return bytes([_BYTES[letter] for letter in spelling]) if all(letter in _BYTES for letter in spelling) else b""
