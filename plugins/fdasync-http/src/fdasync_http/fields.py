"""One rule for the fields of bodies, and the tables that say it for each dialect.

What changes the meaning of a request is served, or refused by name. What only another server knows is ignored, counted,
and named in `/server_info`. The type of a body says what is read; a field that the engine has under the same name asks
for that. The table beside it says what its other fields ask of the engine, and what becomes of fields that the type has
not. A field that neither of them has is refused where the type refuses unknown fields, since it may mean anything
there, and ignored elsewhere.

null is the default, of each field at each level. `RULES` of a type is its table; `OBJECTS` names the types of fields
that are objects themselves, or lists of them. Knows no endpoint. Called by `bodies.py`, which reads every body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from fdasync import GenerateOptions, SamplingParams
from fdasync_http.failures import Refused, unserved
from fdasync_http.known import listed

#: name in an ASGI scope of the function that counts an ignored field
IGNORED = "fdasync_http.ignored"
Ignore: TypeAlias = Callable[[str], None]

_ENGINE = {*SamplingParams.__struct_fields__, *GenerateOptions.__annotations__}
# values with which most fields ask for nothing
_NOTHING: tuple[Any, ...] = (False, "", [], {})


class Engine(NamedTuple):
    """A field that asks the engine for something.

    Attributes:
        fields: of `SamplingParams` or `GenerateOptions`, first the field whose value it is; or "prompt".
        reads_null: null is a value of its own, and not the default.
    """

    fields: tuple[str, ...]
    reads_null: bool = False


class Ignored(NamedTuple):
    """A field that changes nothing here.

    Attributes:
        why: not.
    """

    why: str


class Unserved(NamedTuple):
    """A field that asks for something that is not served.

    Attributes:
        why: not, or what to give in its place.
        unless: values with which it asks for nothing; null is always one.
    """

    why: str
    unless: tuple[Any, ...] = _NOTHING


Table: TypeAlias = Mapping[str, Engine | Ignored | Unserved]


def engine(*fields: str) -> Engine:
    """See `Engine`."""
    return Engine(fields)


def ignored(why: str, *names: str) -> dict[str, Ignored]:
    """Fields that are ignored for one reason."""
    return dict.fromkeys(names, Ignored(why))


def not_served(why: str, *names: str) -> dict[str, Unserved]:
    """Fields that are refused for one reason."""
    return dict.fromkeys(names, Unserved(why))


@cache
def served_by(kind: type[msgspec.Struct]) -> dict[str, Engine]:
    """The fields of a type that ask the engine for something: those with the engine's own names, then the table's."""
    table, names = _table_of(kind), kind.__struct_fields__
    own = {name: Engine((name,)) for name in names if name in _ENGINE and name not in table}
    return {**own, **{name: rule for name, rule in table.items() if isinstance(rule, Engine) and name in names}}


@cache
def asked_by(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """By the engine's field: the fields of a body that ask for it, in the order of `served_by`."""
    found: dict[str, tuple[str, ...]] = {}
    for name, rule in served_by(kind).items():
        for field in rule.fields:
            found[field] = (*found.get(field, ()), name)
    for name, inner in _inner_of(kind).items():
        for field, names in asked_by(inner).items():
            found[field] = (*found.get(field, ()), *[f"{name}.{one}" for one in names])
    return found


def read_by(kind: type[Any], body: bytes | msgspec.Raw, ignore: Ignore, where: str = "") -> dict[str, Any]:
    """The fields of an object that its type reads, as they came; null fields are left out.

    Args:
        body: JSON.
        ignore: called with the name of each field that changes nothing.
        where: what the object stands in, with a dot; "": it is the body.

    Raises Refused (400), which names a field that is not served or not known; msgspec's errors, and UnicodeDecodeError,
    for what is no JSON object.
    """
    table, inner = _table_of(kind), _inner_of(kind)
    kept: dict[str, Any] = {}
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        field, rule = where + name, table.get(name)
        if _begins(value, b"null") and not (isinstance(rule, Engine) and rule.reads_null):
            continue
        if name in inner:
            kept[name] = _inner(inner[name], value, ignore, field)
        elif name in kind.__struct_fields__:
            kept[name] = value
        elif isinstance(rule, Unserved):
            if msgspec.json.decode(value) not in rule.unless:
                raise unserved(field, rule.why)
        elif isinstance(rule, Ignored) or not kind.__struct_config__.forbid_unknown_fields:
            # JSON it must be
            msgspec.json.decode(value)
            ignore(field)
        else:
            raise _unknown(kind, field, where)
    return kept


def _table_of(kind: type[Any]) -> Table:
    table: Table = getattr(kind, "RULES", {})
    return table


def _inner_of(kind: type[Any]) -> Mapping[str, type[msgspec.Struct]]:
    inner: Mapping[str, type[msgspec.Struct]] = getattr(kind, "OBJECTS", {})
    return inner


def _begins(value: msgspec.Raw, text: bytes) -> bool:
    return bytes(memoryview(value)[: len(text)]) == text


def _inner(kind: type[Any], value: msgspec.Raw, ignore: Ignore, field: str) -> Any:
    if _begins(value, b"{"):
        return read_by(kind, value, ignore, f"{field}.")
    if _begins(value, b"["):
        values = msgspec.json.decode(value, type=list[msgspec.Raw])
        return [_inner(kind, one, ignore, f"{field}[{at}]") for at, one in enumerate(values)]
    if _begins(value, b"null"):
        # of a list: the object has its defaults
        return {}
    # for its type to refuse
    return value


def _unknown(kind: type[Any], field: str, where: str) -> Refused:
    inside = f" in {where.rstrip('.')}" if where else ""
    known = [*kind.__struct_fields__, *[name for name, rule in _table_of(kind).items() if isinstance(rule, Ignored)]]
    nearest = [f"did you mean {one}? " for one in get_close_matches(field.removeprefix(where)[:100], known, 1)]
    words = f"there is no such key{inside}; {''.join(nearest)}known are: {listed(known)}"
    return Refused(400, words, param=field[:100], code="unknown_key")
