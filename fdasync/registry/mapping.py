"""Plain values (a parsed TOML or JSON file, a request's body) into a struct, and a check of structs that were made in
Python; a value that does not fit its annotation (type, words, `msgspec.Meta`) is refused by name, with the limit.

`Meta(extra={"hint": ...})` beside a bound is the way out that the error names. A field that is a number is finite.

Pure; the module knows errors only. `request.py`, the configurations and the modules that make plugins call it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fdasync.errors import BadInput

S = TypeVar("S", bound=msgspec.Struct)
# how many unknown names an error lists, and how many characters of each
_MOST_TOLD = 5
_MOST_CHARS = 100
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def struct_of(
    kind: type[S], values: Mapping[str, Any], *, error: type[BadInput] = BadInput, root: str = "", whole: str = ""
) -> S:
    """A struct of this kind with these values, copied except for fields of arbitrary type. Types, words and bounds are
    checked as annotations have them. Raises `error` that names the field, its value and the limit.

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
    return converted(kind, dict(values), error=error, root=root, whole=whole)


def converted(
    kind: type[S], values: dict[str, Any], *, error: type[BadInput] = BadInput, root: str = "", whole: str = ""
) -> S:
    """A struct of this kind with values of fields that exist; see `struct_of`. Raises `error`, whatever the values
    are."""
    try:
        made: S = _taken(values, kind)
        return made
    # msgspec reads text with a lone surrogate, and objects that are half a mapping, without a check
    except Exception as wrong:
        raise _refusal(kind, values, wrong, error, root, whole or root) from None


def check(made: msgspec.Struct, *, error: type[BadInput] = BadInput, root: str = "") -> None:
    """Raise `error`, as `struct_of` does, for the first field of a struct that was made in Python whose value does not
    fit its annotation, and for text that is no Unicode. Structs inside are checked as well; a mapping is no struct."""
    for name, hint in hints_of(type(made)).items():
        value, place = getattr(made, name), f"{root}.{name}" if root else name
        kinds = [bare for bare, _ in alternatives(hint) if _is_struct(bare)]
        if kinds and not isinstance(value, tuple(kinds)):
            others = [bare for bare, _ in alternatives(hint) if bare not in kinds]
            if not any(_fits(value, other) for other in others):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                way_out = "`from_mapping` takes mappings" if isinstance(value, Mapping) else ""
                raise error(place, f"{value!r:.100} is no {wanted}", hint=way_out)
        if isinstance(value, msgspec.Struct):
            check(value, error=error, root=place)
        try:
            _taken(value, hint)
            if isinstance(value, str):
                value.encode()
        except Exception as wrong:
            raise _refusal(hint, value, wrong, error, place, place) from None


def of_text(hint: Any, value: Any, place: str) -> Any:
    """A value as an annotation has it, of a plain value, or of text as a command line has it. Raises BadInput for the
    field `place`."""
    if isinstance(value, str):
        fitting = [bare for bare, _ in alternatives(hint) if _fits(value, bare, strict=False)]
        if not fitting:
            raise BadInput(place, f"{value!r:.100} is not {_words(hint)}")
        value = msgspec.convert(value, fitting[0], strict=False)
    try:
        return _taken(value, hint)
    except Exception as wrong:
        raise _refusal(hint, value, wrong, BadInput, place, place) from None


def common(made: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of a struct's fields that another kind of struct has under the same names."""
    return {name: getattr(made, name) for name in made.__struct_fields__ if name in kind.__struct_fields__}


def _taken(value: Any, hint: Any) -> Any:
    """A value as an annotation has it. Raises OverflowError for a number that is not finite, ValidationError else."""
    made = msgspec.convert(value, hint, str_keys=True)
    if isinstance(made, float) and not math.isfinite(made) and any(map(_is_open, alternatives(hint))):
        raise OverflowError(made)
    if isinstance(made, msgspec.Struct):
        for name, own in _open_fields(type(made)):
            _taken(getattr(made, name), own)
    return made


def _is_open(one: tuple[Any, msgspec.Meta | None]) -> bool:
    """Whether a type of `alternatives` is a number that bounds leave open at an end."""
    bare, meta = one
    return bare is float and (meta is None or meta.ge is meta.gt or meta.le is meta.lt)


@functools.cache
def _open_fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Fields that a bound does not check: of numbers without one, and of structs."""
    hints = get_type_hints(kind, include_extras=True).items()
    return [(name, hint) for name, hint in hints if any(_is_open(o) or _is_struct(o[0]) for o in alternatives(hint))]


def _refusal(hint: Any, value: Any, wrong: Exception, error: type[BadInput], place: str, whole: str) -> BadInput:
    """The error for a value that does not fit its annotation: it names the innermost part that does not."""
    for bare, _ in alternatives(hint):
        if _is_struct(bare) and isinstance(value, dict) and bare.__struct_config__.forbid_unknown_fields:
            known = bare.__struct_encode_fields__
            if unknown := [key for key in value if isinstance(key, str) and key not in known]:
                return _unknown(error, unknown, known, place)
    for step, own, part in _parts(hint, value):
        try:
            _taken(part, own)
        except Exception as inner:
            return _refusal(own, part, inner, error, f"{place}{step}".lstrip("."), whole)
    field = place or whole
    if isinstance(wrong, UnicodeEncodeError):
        return error(field, "has a lone surrogate", hint="it is not valid Unicode text")
    if isinstance(wrong, OverflowError):
        return error(field, f"is {wrong}", limit="a finite number")
    if not isinstance(wrong, msgspec.ValidationError):
        return error(field, f"cannot be read: {type(wrong).__name__}: {wrong}")
    problem, limit, way_out = str(wrong).replace(" - at `key` in `$`", " for a key"), "", ""
    if any(get_origin(bare) is Literal for bare, _ in alternatives(hint)):
        limit = _words(hint)
    for bare, meta in alternatives(hint):
        if meta is not None:
            way_out = (meta.extra or {}).get("hint", way_out)
            if _fits(value, bare) and (told := _out_of_bounds(value, meta)):
                problem, limit = told, limit_of(meta)
            elif meta.min_length is None and meta.max_length is None:
                limit = limit or limit_of(meta)
    return error(field, problem, limit=limit or None, hint=way_out)


def alternatives(hint: Any) -> Iterator[tuple[Any, msgspec.Meta | None]]:
    """The types that a value may have, each with its bounds."""
    if get_origin(hint) is Annotated:
        bare, *metas = get_args(hint)
        meta = next((one for one in metas if isinstance(one, msgspec.Meta)), None)
        yield from ((one, inner or meta) for one, inner in alternatives(bare))
    elif isinstance(hint, UnionType) or get_origin(hint) is Union:
        for one in get_args(hint):
            yield from alternatives(one)
    else:
        yield hint, None


def _parts(hint: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Of each part of a value: how its path goes on from the value's, its annotation, and itself. None of a value that
    has too many."""
    for bare, meta in alternatives(hint):
        most = None if meta is None else meta.max_length
        if most is not None and isinstance(value, list | tuple | dict) and len(value) > most:
            return
        origin, inner = get_origin(bare), get_args(bare)
        if _is_struct(bare) and isinstance(value, dict):
            hints = hints_of(bare)
            yield from ((f".{name}", hints[name], part) for name, part in value.items() if name in hints)
        elif origin is dict and isinstance(value, dict):
            yield from ((f"[{_shown(key)}]", inner[1], part) for key, part in value.items())
        elif origin in (list, tuple) and isinstance(value, list | tuple):
            each = inner if origin is tuple and Ellipsis not in inner else inner[:1] * len(value)
            yield from ((f"[{at}]", own, part) for at, (own, part) in enumerate(zip(each, value, strict=False)))


def _shown(key: object) -> str:
    readable = isinstance(key, int) or (isinstance(key, str) and key.isprintable() and len(key) <= _MOST_CHARS)
    return str(key) if readable else "..."


@functools.cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The annotation of each field, by the name that plain values have for it."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _is_struct(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _fits(value: Any, bare: Any, strict: bool = True) -> bool:
    # Objects of callers may raise anything while they are read.
    # Here and above, any error means that a value does not fit.
    try:
        msgspec.convert(value, bare, strict=strict, str_keys=True)
    except Exception:
        return False
    return True


def _out_of_bounds(value: Any, meta: msgspec.Meta) -> str:
    """What is wrong with a value of the right type; "": msgspec has better words."""
    if meta.pattern is not None or meta.multiple_of is not None:
        return ""
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"has {len(value)} {'characters' if isinstance(value, str) else 'entries'}"
    return f"{value!r:.100} is {'too small' if meta.le is None and meta.lt is None else 'out of range'}"


def limit_of(meta: msgspec.Meta) -> Any:
    """The bounds of an annotation in words, such as "1 to 64"; "": it has none."""
    low = meta.min_length if meta.ge is None else meta.ge
    high = meta.max_length if meta.le is None else meta.le
    if low is not None and high is not None:
        return f"{low} to {high}"
    first = f"at least {low}" if low is not None else "" if meta.gt is None else f"above {meta.gt}"
    last = f"up to {high}" if high is not None else "" if meta.lt is None else f"below {meta.lt}"
    return ", ".join(filter(None, (first, last)))


def _words(hint: Any) -> str:
    """What a field takes."""
    return " or ".join(
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else _WORDS.get(kind, "a list")
        for kind, _ in alternatives(hint)
        if kind is not type(None)
    )


def _unknown(error: type[BadInput], unknown: list[str], known: tuple[str, ...], root: str) -> BadInput:
    first, *others = unknown
    close = nearest(first, known)
    more = [
        f"{other!r:.100}{f' ({near!r}?)' if (near := nearest(other, known)) else ''}" for other in others[:_MOST_TOLD]
    ]
    if len(others) > _MOST_TOLD:
        more.append(f"{len(others) - _MOST_TOLD} others")
    problem = "is not a key that exists" + (f", nor is {', nor '.join(more)}" if more else "")
    # a name that cannot be read where it is printed is quoted
    name = first if first.isprintable() and len(first) <= _MOST_CHARS else f"{first!r:.{_MOST_CHARS}}"
    return error(f"{root}.{name}" if root else name, problem, hint=f"did you mean {close!r}?" if close else "")


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The name that a wrong one was probably meant to be; ""."""
    found = get_close_matches(name.lower(), known, n=1)
    return found[0] if found else ""
