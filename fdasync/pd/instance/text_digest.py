"""What a tokenizer makes of text, as a digest: two instances must agree on it, or a text means something else to each.

A tokenizer may say what it is made of (`Fingerprinted`). Others have no names that could be compared, so they are
tried: some text of many kinds is encoded, and the whole vocabulary is decoded. Called by `instance.py`, once.
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
# decoded at a time
_IDS = 64


def text_digest(tokenizer: Tokenizer | None, vocab_size: int) -> bytes:
    """16 bytes; empty where there is no tokenizer. What it cannot do is part of what it is."""
    if tokenizer is None:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(tokenizer, Fingerprinted):
        digest.update(tokenizer.fingerprint())
        return digest.digest()
    for text in _TEXTS:
        digest.update(_told(tokenizer.encode, text))
    for first in range(0, vocab_size, _IDS):
        digest.update(_told(tokenizer.decode, list(range(first, min(first + _IDS, vocab_size)))))
    return digest.digest()


def _told(call: Callable[[Any], object], argument: object) -> bytes:
    try:
        return repr(call(argument)).encode(errors="surrogatepass") + b"\0"
    except Exception as error:
        # a tokenizer may raise what it likes
        return type(error).__name__.encode() + b"\0"
