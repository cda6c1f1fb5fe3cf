"""Plain values (a parsed TOML or JSON file, a request's body) into a struct; what does not fit is refused by name.

Pure. Knows errors only. Used by whatever takes a mapping from a caller: sampling, configuration, plugins' own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from fdasync.errors import BadInput

S = TypeVar("S", bound=msgspec.Struct)


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
        raise error.of_validation(wrong, root, whole) from None


def _unknown(error: type[BadInput], unknown: list[str], known: tuple[str, ...], root: str) -> BadInput:
    first, *others = unknown
    nearest = _nearest(first, known)
    more = [f"{other!r:.100}{f' ({near!r}?)' if (near := _nearest(other, known)) else ''}" for other in others]
    problem = "is not a key that exists" + (f", nor is {', nor '.join(more)}" if more else "")
    return error(f"{root}.{first}" if root else first, problem, hint=f"did you mean {nearest!r}?" if nearest else "")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    found = get_close_matches(name.lower(), known, n=1)
    return found[0] if found else ""
