"""Text to token ids and back, from the tokenizer files of a checkpoint folder.

Uses the `tokenizers` library alone when the folder has a tokenizer.json, so that a tokenizing child process
never imports torch; falls back to transformers' AutoTokenizer for folders with older files. Knows nothing
of chat templates, requests or streams. Registered as `transformers` under `fdasync.tokenizers`.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import Tokenizer


def load_tokenizer(model_folder: str) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Reads local files only.

    Raises:
        CheckpointError: no such folder, no tokenizer files, or files that do not load.
    """
    folder = Path(model_folder)
    if not folder.is_dir():
        raise CheckpointError(model_folder, "is not a folder")
    path = folder / "tokenizer.json"
    if path.exists():
        return _FastTokenizer(_load_fast(path))
    return _SlowTokenizer(_load_slow(folder))


class _FastTokenizer:
    """A tokenizer.json. Truncation and padding that the file may ask for are switched off."""

    def __init__(self, inner: Any) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens and ids that the vocabulary lacks are left out."""
        text: str = self._inner.decode([int(token) for token in token_ids], skip_special_tokens=True)
        return text

    def fingerprint(self) -> bytes:
        """Of the tokenizer.json as the library would write it."""
        return hashlib.blake2b(self._inner.to_str().encode(), digest_size=16).digest()


class _SlowTokenizer:
    """Whatever AutoTokenizer made of the folder."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner(text, add_special_tokens=True, truncation=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._inner.decode(
            [int(token) for token in token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def fingerprint(self) -> bytes:
        """Of its class, its vocabulary and which tokens are special."""
        inner = self._inner
        made_of = (type(inner).__name__, sorted(inner.get_vocab().items()), sorted(inner.all_special_tokens))
        return hashlib.blake2b(repr(made_of).encode(errors="surrogatepass"), digest_size=16).digest()


def _check_text(text: str) -> None:
    # the Rust side takes UTF-8 and answers a lone surrogate with a TypeError or a panic
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput("text", f"has a lone surrogate at character {error.start}, so it is not Unicode") from None


def _load_fast(path: Path) -> Any:
    from tokenizers import Tokenizer as Fast

    try:
        return Fast.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise CheckpointError(str(path), f"does not load as a tokenizer: {error}") from error


def _load_slow(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer_config.json", "vocab.json", "tokenizer.model")):
        raise CheckpointError(str(folder), "has no tokenizer files (tokenizer.json, or those of AutoTokenizer)")
    auto: Any = import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # missing packages, bad JSON, unknown classes: one answer for the caller
        raise CheckpointError(str(folder), f"AutoTokenizer does not load it: {error}") from error
