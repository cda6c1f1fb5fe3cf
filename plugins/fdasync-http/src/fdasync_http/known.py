"""What a client could have sent in place of what was refused: the keys of an object, the words of a choice.

Pure: reads the types of bodies. Called by `bodies.py` and, for queries, by `application.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import inspect

from fdasync_http.failures import Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# of msgspec's paths: a field, or an entry of a list or an object
_STEP = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
# that a message lists
_MOST = 40


def words_at(kind: Any, path: str) -> tuple[str, ...]:
    """The words of the choice that a type has at a path of msgspec's (`.tags[0]`); (): it has none there."""
    found = _all_of(inspect.type_info(kind))
    for step in _STEP.finditer(path):
        found = [inner for one in found for inner in _within(one, step[1])]
    words = [str(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values]
    return tuple(dict.fromkeys(words))


def _all_of(one: inspect.Type) -> list[inspect.Type]:
    """A type, or the types of a union."""
    return list(one.types) if isinstance(one, inspect.UnionType) else [one]


def _within(one: inspect.Type, name: str | None) -> list[inspect.Type]:
    """What a type has in a field of this name; None: in its entries."""
    if name is not None:
        fields = one.fields if isinstance(one, inspect.StructType) else ()
        return [inner for field in fields if field.encode_name == name for inner in _all_of(field.type)]
    if isinstance(one, inspect.ListType | inspect.VarTupleType):
        return _all_of(one.item_type)
    return _all_of(one.value_type) if isinstance(one, inspect.DictType) else []


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    shown = list(names)
    more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    return (", ".join(shown[:_MOST]) or "none") + more


def check_query(given: Collection[str], known: Collection[str]) -> None:
    """Raises Refused (400) for a key of a query that its path does not read: what a client meant by it would not
    happen."""
    for key in given:
        if key not in known:
            words = f"this path has no such key in its query; it knows: {listed(known)}"
            raise Refused(400, words, param=key[:100], code="unknown_key")
