"""Plain values (a parsed TOML or JSON file, a request's body) into a struct; a value that does not fit is refused by
name.

Pure; the module knows errors only. `request.py`, the configurations and the modules that make plugins call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from fdasync.errors import BadInput

S = TypeVar("S", bound=msgspec.Struct)
# how many unknown names an error lists, and how many characters of each
_MOST_TOLD = 5
_MOST_CHARS = 100


def struct_of(
    kind: type[S], values: Mapping[str, Any], *, error: type[BadInput] = BadInput, root: str = "", whole: str = ""
) -> S:
    """A struct of this kind with these values, copied except for fields of arbitrary type. Types are checked, ranges
    are not. Raises `error` that names the field.

    Args:
        root: stands before every field's name, with a dot.
        whole: name of the mapping itself in errors; `root` unless it is given.
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
    return converted(kind, dict(values), error=error, root=root, whole=whole)


def converted(
    kind: type[S], values: dict[str, Any], *, error: type[BadInput] = BadInput, root: str = "", whole: str = ""
) -> S:
    """A struct of this kind with values of fields that exist; see `struct_of`. Raises `error`, whatever the values
    are."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as wrong:
        raise refusal_of(kind, wrong, error=error, root=root, whole=whole) from None
    except Exception as wrong:
        # msgspec reads text with a lone surrogate, and objects that are half a mapping, without a check
        raise _unreadable(kind, values, wrong, error, root, whole) from None


def _unreadable(
    kind: type[msgspec.Struct],
    values: Mapping[str, Any],
    wrong: Exception,
    error: type[BadInput],
    root: str,
    whole: str,
) -> BadInput:
    """The error for values that cannot be read at all, which names the first such field."""
    hints = get_type_hints(kind, include_extras=True)
    names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    found = whole or root
    for key, value in values.items():
        try:
            msgspec.convert(value, hints[names[key]], str_keys=True)
        except msgspec.ValidationError:
            continue
        except Exception as own:
            found, wrong = f"{root}.{key}" if root else key, own
            break
    if isinstance(wrong, UnicodeEncodeError):
        return error(found, "has a lone surrogate", hint="it is not valid Unicode text")
    return error(found, f"cannot be read: {type(wrong).__name__}: {wrong}")


def refusal_of(
    kind: type[msgspec.Struct],
    wrong: msgspec.ValidationError,
    *,
    error: type[BadInput] = BadInput,
    root: str = "",
    whole: str = "",
) -> BadInput:
    """The error for values of the wrong type; see `struct_of` for the arguments."""
    refusal = error.of_validation(wrong, root, whole)
    choices = _choices(kind, refusal.field.removeprefix(f"{root}."))
    return error(refusal.field, refusal.problem, limit=choices) if choices else refusal


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
    """The words that a `Literal` field, or an entry of a list or tuple of them, may be; "" for any other field."""
    name, entry, _ = field.partition("[")
    hint = get_type_hints(kind).get(name)
    if entry and get_origin(hint) in (list, tuple):
        hint = get_args(hint)[0]
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else ""


def _nearest(name: str, known: tuple[str, ...]) -> str:
    found = get_close_matches(name.lower(), known, n=1)
    return found[0] if found else ""
