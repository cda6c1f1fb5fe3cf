"""Hooks of a model that must not be on its copies. Knows no trainers; those and the slices of ranks derive from it."""

from __future__ import annotations

from typing import Any, NoReturn

from fdasync.errors import BadInput


class NotCopied:
    """Base of hooks that stay on a model for a while and must not be on a copy, from which nothing would remove them.

    `copy.deepcopy` and pickling raise BadInput, of the hook and of every object that contains it: the model, a part of
    it, or an owner of the model. A shallow copy of a model shares its hooks, and loses them with it.
    """

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _copied()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _copied()


def _copied() -> BadInput:
    return BadInput(
        "model",
        "is copied or pickled while its routing is forced or observed, or its numerics are fixed",
        hint="copy it outside of the context",
    )
