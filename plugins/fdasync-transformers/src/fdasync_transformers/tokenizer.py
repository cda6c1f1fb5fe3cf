"""Text to token ids and back, from the tokenizer files of a checkpoint folder.

Uses the `tokenizers` library alone when the folder has a tokenizer.json, so that a tokenizing child process never
imports torch; falls back to transformers' AutoTokenizer for folders with older files, and to render chat templates.
Tokens that tokenizer_config.json alone names are added as AutoTokenizer adds them, and the text of a chat becomes
tokens as any text does: there is one tokenizer.

A chat template is a Jinja program from the checkpoint. The library renders it in Jinja's ImmutableSandboxedEnvironment:
it reaches no files, no imports and no attributes of Python's own, and cannot change its variables. The sandbox bounds
neither time nor memory, and no more are the patterns bounded by which a checkpoint has answers parsed: do both in a
process that they may hold up. No other code of a checkpoint is run.

Knows nothing of requests or streams. Registered as `transformers` under `fdasync.tokenizers`; made in the tokenizer's
process.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput, ChatUnsupported, CheckpointError, TokenizerFailed
from fdasync_transformers.vocabulary import Pieces, add_named_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.tokenizer import JsonObject, Tokenizer

# where a checkpoint keeps its chat template, and how to read answers
_CHAT_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates")


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
        return _FastTokenizer(_load_fast(path, folder / "tokenizer_config.json"), folder)
    return _SlowTokenizer(_load_slow(folder), folder)


class _Chat(ABC):
    """The part of both tokenizers that needs the library's: chat templates, and answers that are read.

    Args:
        folder: of the checkpoint.
        library: the library's tokenizer; None: it is made when it is first needed, since it imports transformers.
    """

    def __init__(self, folder: Path, library: Any = None) -> None:
        self._folder = folder
        self._made = library

    @property
    def _library(self) -> Any:
        """None where the folder has no file that could hold a template."""
        if self._made is None and any((self._folder / name).exists() for name in _CHAT_FILES):
            self._made = _load_auto(self._folder)
        return self._made

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Tokens of a text, without the special tokens that the tokenizer puts around it."""

    @abstractmethod
    def _decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""

    def chat_template(self, *, with_tools: bool = False) -> str:
        template = getattr(self._library, "chat_template", None)
        if isinstance(template, dict):
            # the library looks for these names
            names = ("tool_use", "default") if with_tools else ("default",)
            template = next((template[name] for name in names if name in template), None)
        return template if isinstance(template, str) else ""

    def apply_chat_template(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: JsonObject | None = None,
    ) -> list[int]:
        if not self.chat_template(with_tools=bool(tools)):
            raise ChatUnsupported(type(self).__name__, f"has no chat template: {self._folder} brings none")
        _check_objects("messages", messages)
        if not messages:
            raise BadInput("messages", "are empty", limit="at least one message")
        if tools is not None:
            _check_objects("tools", tools)
        if add_generation_prompt and continue_final_message:
            problem = "cannot be there if add_generation_prompt is"
            raise BadInput("continue_final_message", problem, hint="a message is continued, or a new one is begun")
        render = self._library.apply_chat_template
        variables: dict[Any, Any] = dict(template_kwargs or {})
        for name in variables:
            # the library's own arguments: a template of the caller's, another form of the result
            if not isinstance(name, str) or name in signature(render).parameters.keys() - {"documents"}:
                raise BadInput("template_kwargs", f"{name!r} is no variable of a template")
        try:
            text: str = render(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template raises in its own words; the library raises errors of many types
            raise BadInput(
                "messages", f"the chat template refuses them: {str(error) or type(error).__name__}"
            ) from error
        return self._encode_plain(text)

    def parse_response(
        self, token_ids: Sequence[int], prompt_token_ids: Sequence[int], *, tools: Sequence[JsonObject] | None = None
    ) -> dict[str, Any] | None:
        library = self._library
        if getattr(library, "response_template", None) is None:
            return None
        answer, prompt = self._decode_all(token_ids), self._decode_all(prompt_token_ids)
        try:
            message: dict[str, Any] = library.parse_response(
                answer, prefix=prompt, tools=[dict(tool) for tool in tools] if tools else None
            )
        except Exception as error:  # the library raises errors of many types for answers that do not fit
            raise TokenizerFailed(type(self).__name__, f"the answer cannot be read: {error}") from error
        return message


class _FastTokenizer(_Chat):
    """A tokenizer.json. Truncation and padding of the file are switched off.

    Args:
        pieces: of the same tokenizer; None: they are made when the first is asked for.
    """

    def __init__(self, inner: Any, folder: Path, *, specials: bool = False, pieces: Pieces | None = None) -> None:
        super().__init__(folder)
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._specials = specials
        self._pieces = pieces

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens and ids that the vocabulary lacks are left out."""
        text: str = self._inner.decode([int(token) for token in token_ids], skip_special_tokens=not self._specials)
        return text

    def with_specials(self) -> _FastTokenizer:
        return _FastTokenizer(self._inner, self._folder, specials=True, pieces=self._all_pieces())

    def piece(self, token_id: int) -> bytes:
        return self._all_pieces().of(token_id)

    def spelling(self, token_id: int) -> str:
        return self._all_pieces().spelling(token_id)

    def _all_pieces(self) -> Pieces:
        if self._pieces is None:
            added = {token: one.content for token, one in self._inner.get_added_tokens_decoder().items()}
            self._pieces = Pieces(self._encode_plain, self._decode_all, self._inner.id_to_token, added)
        return self._pieces

    def _encode_plain(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(token) for token in token_ids], skip_special_tokens=False)
        return text

    def fingerprint(self) -> bytes:
        """A digest of the tokenizer as the library writes it, with the tokens of tokenizer_config.json."""
        return hashlib.blake2b(self._inner.to_str().encode(), digest_size=16).digest()


class _SlowTokenizer(_Chat):
    """The tokenizer that AutoTokenizer made of a folder."""

    def __init__(self, inner: Any, folder: Path, *, specials: bool = False, pieces: Pieces | None = None) -> None:
        super().__init__(folder, inner)
        self._inner = inner
        self._specials = specials
        self._pieces = pieces

    def with_specials(self) -> _SlowTokenizer:
        return _SlowTokenizer(self._inner, self._folder, specials=True, pieces=self._all_pieces())

    def piece(self, token_id: int) -> bytes:
        return self._all_pieces().of(token_id)

    def spelling(self, token_id: int) -> str:
        return self._all_pieces().spelling(token_id)

    def _all_pieces(self) -> Pieces:
        if self._pieces is None:
            inner = self._inner
            added = {token: str(one) for token, one in inner.added_tokens_decoder.items()}
            self._pieces = Pieces(self._encode_plain, self._decode_all, inner.convert_ids_to_tokens, added)
        return self._pieces

    def _encode_plain(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner(text, add_special_tokens=False, truncation=False)["input_ids"]
        return ids

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        ids = [int(token) for token in token_ids]
        text: str = self._inner.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        return text

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        ids: list[int] = self._inner(text, add_special_tokens=True, truncation=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._inner.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=not self._specials,
            clean_up_tokenization_spaces=False,
        )
        return text

    def fingerprint(self) -> bytes:
        """A digest of its class, its vocabulary and its special tokens."""
        inner = self._inner
        made_of = (type(inner).__name__, sorted(inner.get_vocab().items()), sorted(inner.all_special_tokens))
        return hashlib.blake2b(repr(made_of).encode(errors="surrogatepass"), digest_size=16).digest()


def _check_objects(field: str, values: Sequence[JsonObject]) -> None:
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise BadInput(field, "are no list of JSON objects")


def _check_text(text: str) -> None:
    # the Rust side takes UTF-8 and answers a lone surrogate with a TypeError or a panic
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput("text", f"has a lone surrogate at character {error.start}, so it is not Unicode") from None


def _load_fast(path: Path, config: Path) -> Any:
    from tokenizers import Tokenizer as Fast

    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise CheckpointError(str(path), f"does not load as a tokenizer: {error}") from error
    if config.exists():
        try:
            add_named_tokens(fast, json.loads(config.read_bytes()))
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(str(config), f"its tokens cannot be read: {error}") from error
    return fast


def _load_slow(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer_config.json", "vocab.json", "tokenizer.model")):
        raise CheckpointError(str(folder), "has no tokenizer files (tokenizer.json, or those of AutoTokenizer)")
    return _load_auto(folder)


def _load_auto(folder: Path) -> Any:
    auto: Any = import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # missing packages, bad JSON, unknown classes: one answer for the caller
        raise CheckpointError(str(folder), f"AutoTokenizer does not load it: {error}") from error
