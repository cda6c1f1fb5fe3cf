"""Tokens that a checkpoint's tokenizer_config.json names and its tokenizer.json has not.

They are added in the order in which transformers' AutoTokenizer adds them, so they have the ids that a trainer's have.
Called by `tokenizer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("extra_special_tokens", "additional_special_tokens")
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


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
