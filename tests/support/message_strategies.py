"""Hypothesis strategies for every message, made from the types themselves: a new message or field is tested at once.

`obeys` checks a value against the same types by other means than the decoder's.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
from fdasync_fleet import messages
from hypothesis import strategies as st
from msgspec import inspect

from fdasync.cache.aux import AuxSpec

TYPES: tuple[type[messages.Message], ...] = get_args(messages.AnyMessage)
INFOS = {kind: inspect.type_info(kind) for kind in TYPES}
# msgpack's own integers
_LOW, _HIGH = -(2**63), 2**64 - 1
_MOST_ITEMS = 3
_MOST_CHARS = 24


def _bounds(info: inspect.IntType | inspect.FloatType, low: float, high: float) -> tuple[float, float]:
    whole = isinstance(info, inspect.IntType)
    low = low if info.ge is None else info.ge
    if info.gt is not None:
        low = info.gt + 1 if whole else math.nextafter(info.gt, math.inf)
    high = high if info.le is None else info.le
    if info.lt is not None:
        high = info.lt - 1 if whole else math.nextafter(info.lt, -math.inf)
    return low, high


def of_info(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type, small but up to its bounds where that is cheap."""
    match info:
        case inspect.IntType():
            low, high = _bounds(info, _LOW, _HIGH)
            return st.integers(int(low), int(high)) | st.sampled_from([int(low), int(high)])
        case inspect.FloatType():
            low, high = _bounds(info, -math.inf, math.inf)
            return st.floats(low, high, allow_nan=False)
        case inspect.Metadata():
            return of_info(info.type)
        case inspect.StrType():
            least = info.min_length or 0
            return st.text(min_size=least, max_size=min(info.max_length or _MOST_CHARS, max(least, _MOST_CHARS)))
        case inspect.BytesType():
            least = info.min_length or 0
            return st.binary(min_size=least, max_size=min(info.max_length or _MOST_CHARS, max(least, _MOST_CHARS)))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            # settings of a plugin
            return st.none() | st.integers(-9, 9) | st.text(max_size=8)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.TupleType():
            return st.tuples(*map(of_info, info.item_types))
        case inspect.VarTupleType():
            most = min(_MOST_ITEMS, info.max_length if info.max_length is not None else _MOST_ITEMS)
            items = st.lists(of_info(info.item_type), min_size=info.min_length or 0, max_size=most)
            return items.map(tuple)
        case inspect.DictType():
            return st.dictionaries(of_info(info.key_type), of_info(info.value_type), max_size=_MOST_ITEMS)
        case inspect.UnionType():
            return st.one_of(*map(of_info, info.types))
        case inspect.StructType():
            if info.cls is AuxSpec:
                # it refuses what cannot be
                shapes = st.lists(st.integers(1, 64), min_size=1, max_size=3).map(tuple)
                dtypes = st.sampled_from(["uint8", "uint16", "int32", "uint32", "float16", "float32"])
                return st.builds(AuxSpec, st.text(min_size=1, max_size=20), shapes, dtypes)
            return st.builds(info.cls, **{field.name: of_info(field.type) for field in info.fields})
    raise TypeError(f"no strategy for {info}")


def messages_of(*kinds: type[messages.Message]) -> st.SearchStrategy[messages.Message]:
    """Messages of these kinds, or of all."""
    return st.sampled_from(kinds or TYPES).flatmap(lambda kind: of_info(INFOS[kind]))


def obeys(info: inspect.Type, value: Any) -> bool:
    """Whether a value is within every bound of its type."""
    match info:
        case inspect.IntType() | inspect.FloatType():
            low, high = _bounds(info, -math.inf, math.inf)
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            unbound = info.ge is info.gt is info.le is info.lt is None
            return unbound or low <= value <= high
        case inspect.Metadata():
            return obeys(info.type, value)
        case inspect.StrType() | inspect.BytesType():
            kind = str if isinstance(info, inspect.StrType) else bytes
            return isinstance(value, kind) and _long_enough(info, value)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.AnyType():
            return True
        case inspect.NoneType():
            return value is None
        case inspect.LiteralType():
            return value in info.values
        case inspect.TupleType():
            return (
                isinstance(value, tuple)
                and len(value) == len(info.item_types)
                and all(map(obeys, info.item_types, value))
            )
        case inspect.VarTupleType():
            items = isinstance(value, tuple) and all(obeys(info.item_type, item) for item in value)
            return items and _long_enough(info, value)
        case inspect.DictType():
            pairs = value.items() if isinstance(value, dict) else [(None, None)]
            return all(obeys(info.key_type, key) and obeys(info.value_type, inner) for key, inner in pairs)
        case inspect.UnionType():
            return any(obeys(each, value) for each in info.types)
        case inspect.StructType():
            fields = ((field.type, getattr(value, field.name, None)) for field in info.fields)
            return isinstance(value, info.cls) and all(obeys(kind, inner) for kind, inner in fields)
    raise TypeError(f"cannot check {info}")


def _long_enough(info: inspect.StrType | inspect.BytesType | inspect.VarTupleType, value: Any) -> bool:
    most = info.max_length if info.max_length is not None else math.inf
    return (info.min_length or 0) <= len(value) <= most


def is_sound(message: object) -> bool:
    """Whether this is a message, and within its bounds."""
    return type(message) in INFOS and obeys(INFOS[type(message)], message)  # type: ignore[index]


def raw(*values: Any) -> bytes:
    """Bytes of an array, as a sender that keeps no rule would write it."""
    return msgspec.msgpack.encode(values)
