"""The tokens of a library's tokenizer: tokens that tokenizer.json lacks, and what one token puts into a text.

Tokens that tokenizer_config.json alone names are added in the order in which transformers' AutoTokenizer adds them, so
they have the ids that a trainer's have.

A decoder drops a space at the start of a text and cannot show a part of a character. So to find its piece, a token is
decoded behind a letter, and where that has no whole characters, its bytes are read from its spelling in the vocabulary:
a letter for each byte if it is byte-level, `<0xE4>` with a byte fallback. Called by `tokenizer.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("extra_special_tokens", "additional_special_tokens")
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

_LETTER = "a"
_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def add_named_tokens(fast: Any, config: dict[str, Any]) -> None:
    """Add the tokens of a configuration to a tokenizer of the `tokenizers` library. Raises what the library and a
    configuration of another shape raise: ValueError, TypeError or AttributeError."""
    own = list(fast.get_added_tokens_decoder().values())
    # the library tells tokens apart by all their fields: one whose fields differ is changed
    known = {repr(token) for token in own}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    tokens = [token for _, fields in listed if repr(token := _token(fields)) not in known]
    contents = {token.content for token in (*own, *tokens)}
    for token in _named(config):
        if token.content not in contents:
            contents.add(token.content)
            tokens.append(token)
    if tokens:
        fast.add_tokens(tokens)


def _named(config: dict[str, Any]) -> Iterator[Any]:
    """Special tokens by their uses, then further ones."""
    for name in _NAMED:
        if config.get(name):
            yield _token(config[name], special=True)
    for name in _LISTED:
        further = config.get(name) or []
        for value in further.values() if isinstance(further, dict) else further:
            yield _token(value, special=True)


def _token(value: Any, **more: Any) -> Any:
    """A token that is written as its text, or as an object."""
    from tokenizers import AddedToken

    fields = {"content": value} if isinstance(value, str) else {name: value[name] for name in _FIELDS if name in value}
    return AddedToken(**{**fields, **more})


def _byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: a byte that is no visible letter of Latin-1 has one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


class Pieces:
    """What each token puts into a text; see the module.

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

    def spelling(self, token_id: int) -> str:
        """Spelling of one token; "" for an id without one."""
        return self._added.get(token_id) or self._spelling(token_id) or ""

    def of(self, token_id: int) -> bytes:
        """Bytes of one token; b"" for an id without one."""
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
