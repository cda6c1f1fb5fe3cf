"""Makes a digest of a tokenizer, in which two instances must agree: else a text would have other tokens on each.

A tokenizer may give its own fingerprint (`Fingerprinted`). Another tokenizer's digest is made by trying it: it encodes
texts of many kinds and decodes the whole vocabulary. Knows no messages. Called by `instance.py`, once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fdasync.engine.tokenizer import Fingerprinted

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.tokenizer import Tokenizer

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " I've  paid $1,234.50\n\n\tfor 12345678 'naïve' cafés: don't!",
    "def f(x):\n        return x**2 != 0x1F",
    "Ünïcödé Привет мир שלום नमस्ते 你好 世界 こんにちは 안녕 \U0001f469\u200d\U0001f52c",
    "<s></s><|im_start|>user<|endoftext|>[INST]",
)
# ids decoded at a time
_IDS = 64


def text_digest(tokenizer: Tokenizer | None, vocab_size: int) -> bytes:
    """The digest, 16 bytes; empty without a tokenizer. Errors that the tokenizer raises are part of it."""
    if tokenizer is None:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(tokenizer, Fingerprinted):
        digest.update(tokenizer.fingerprint())
        return digest.digest()
    for text in _TEXTS:
        digest.update(_result(tokenizer.encode, text))
    for first in range(0, vocab_size, _IDS):
        digest.update(_result(tokenizer.decode, list(range(first, min(first + _IDS, vocab_size)))))
    return digest.digest()


def _result(call: Callable[[Any], object], argument: object) -> bytes:
    try:
        return repr(call(argument)).encode(errors="surrogatepass") + b"\0"
    except Exception as error:
        # a tokenizer may raise any error
        return type(error).__name__.encode() + b"\0"
