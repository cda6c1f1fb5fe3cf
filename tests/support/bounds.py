"""Values just outside of what a struct's annotations allow: a new field is covered by its annotation."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec


def outside(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Each field that declares bounds or words, with a value that is just outside of them."""
    return [(name, value) for name, hint in _hints(kind) for value in _outside(hint)]


def unbounded(kind: type[msgspec.Struct]) -> set[str]:
    """Fields that are numbers and declare no bound."""
    return {name for name, hint in _hints(kind) for one in _each(hint) if one in (int, float)}


def _hints(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any]]:
    yield from get_type_hints(kind, include_extras=True).items()


def _each(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def _outside(hint: Any) -> Iterator[Any]:
    for one in _each(hint):
        if get_origin(one) is Literal:
            yield "a word that is none of them"
        if get_origin(one) is not Annotated:
            continue
        bare, meta = get_args(one)
        if bare is str:
            yield from ("x" * (meta.max_length + 1),) if meta.max_length is not None else ()
            yield from ("x" * (meta.min_length - 1),) if meta.min_length is not None else ()
            continue
        least = 1 if bare is int else 1e-6
        yield from (bound - least for bound in (meta.ge,) if bound is not None)
        yield from (bound for bound in (meta.gt, meta.lt) if bound is not None)
        if meta.le is not None:
            yield meta.le + max(least, abs(meta.le) * 1e-9 if bare is float else 0)
        if bare is float:
            yield float("nan")
