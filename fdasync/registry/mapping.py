"""Plain values (a parsed TOML or JSON file, a request's body) into a struct; what does not fit is refused by name.

Pure. Knows errors only. Used by whatever takes a mapping from a caller: sampling, configuration, plugins' own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from fdasync.errors import BadInput

S = TypeVar("S", bound=msgspec.Struct)
# of unknown names: how many are told, and how much of each
_MOST_TOLD = 5
_MOST_CHARS = 100


def struct_of(
    kind: type[S], values: Mapping[str, Any], *, error: type[BadInput] = BadInput, root: str = "", whole: str = ""
) -> S:
    """A struct of this kind with these values; shares nothing that the caller could change but what the kind leaves as
    it is. Types are checked, ranges are not. Raises `error` that names the field.

    Args:
        root: stands before every field's name, with a dot.
        whole: what the mapping itself is called; `root` unless it is given.
    """
    whole = whole or root
    given: object = values
    if not isinstance(given, Mapping):
        raise error(whole, f"a mapping is needed, not {type(values).__name__}")
    for key in values:
        if not isinstance(key, str):
            raise error(whole, f"{key!r:.100} is no name of a field")
    known = kind.__struct_encode_fields__
    unknown = [key for key in values if key not in known]
    if unknown and kind.__struct_config__.forbid_unknown_fields:
        raise _unknown(error, unknown, known, root)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as wrong:
        told = error.of_validation(wrong, root, whole)
        choices = _choices(kind, told.field.removeprefix(f"{root}."))
        raise error(told.field, told.problem, limit=choices) if choices else told from None


def _unknown(error: type[BadInput], unknown: list[str], known: tuple[str, ...], root: str) -> BadInput:
    first, *others = unknown
    nearest = _nearest(first, known)
    more = [
        f"{other!r:.100}{f' ({near!r}?)' if (near := _nearest(other, known)) else ''}" for other in others[:_MOST_TOLD]
    ]
    if len(others) > _MOST_TOLD:
        more.append(f"{len(others) - _MOST_TOLD} others")
    problem = "is not a key that exists" + (f", nor is {', nor '.join(more)}" if more else "")
    # a name that cannot be read where it is printed is quoted
    name = first if first.isprintable() and len(first) <= _MOST_CHARS else f"{first!r:.{_MOST_CHARS}}"
    return error(f"{root}.{name}" if root else name, problem, hint=f"did you mean {nearest!r}?" if nearest else "")


def _choices(kind: type[msgspec.Struct], field: str) -> str:
    """What a field may be, where it is one of a few words; else ""."""
    hint = get_type_hints(kind).get(field)
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else ""


def _nearest(name: str, known: tuple[str, ...]) -> str:
    found = get_close_matches(name.lower(), known, n=1)
    return found[0] if found else ""
