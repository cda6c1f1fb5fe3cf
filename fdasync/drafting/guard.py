"""Stands before a drafter: its errors and breaches of its contract end in a PluginError that names it.

A drafter is a plugin, and the scheduler trusts what `planning.py` makes of its answers: columns of wrong lengths would
go on as wrong paths of other sequences. Tokens need no look, since runners take any bits (docs/design.md, rule 41).
Called by `planning.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fdasync.drafting.base import Drafter
from fdasync.errors import PLUGIN_ERRORS, PluginError
from fdasync.registry.registry import DRAFTERS

if TYPE_CHECKING:
    from fdasync.drafting.base import Counts, Tokens


class GuardedDrafter:
    """A drafter's calls; each raises PluginError instead of the drafter's own errors.

    Args:
        name: of the drafter, for errors.
    """

    def __init__(self, drafter: Drafter, name: str) -> None:
        self._drafter = drafter
        self._name = name

    def call(self, verb: Literal["begin_all", "take", "end"], *args: Any, **more: Any) -> None:
        """See `Drafter`, of every verb but `propose`."""
        try:
            getattr(self._drafter, verb)(*args, **more)
        except PLUGIN_ERRORS as error:
            is_default = verb == "begin_all" and type(self._drafter).begin_all is Drafter.begin_all
            raise self._broken("begin" if is_default else verb, error) from error

    @property
    def outlasts(self) -> bool:
        """See `Drafter`; what is no answer counts as True."""
        try:
            return self._drafter.outlasts is not False
        except PLUGIN_ERRORS as error:
            raise self._broken("outlasts", error) from error

    def propose(self, keys: tuple[int, ...], most: Counts) -> tuple[Counts, Tokens]:
        """See `Drafter`; checks the columns. The caller owns `most`, which the drafter gets a copy of."""
        try:
            answer: object = self._drafter.propose(keys, most.copy())
        except PLUGIN_ERRORS as error:
            raise self._broken("propose", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._nonsense(f"{answer!r:.100} is no pair of counts and tokens")
        counts: object
        tokens: object
        counts, tokens = answer
        if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iu" or counts.shape != most.shape:
            raise self._nonsense(f"{counts!r:.100} are no counts of {len(most)} paths")
        paths = counts.astype(np.int64, copy=False)
        wrong = np.flatnonzero((paths < 0) | (paths > most))
        if len(wrong):
            at = int(wrong[0])
            raise self._nonsense(f"a path of {paths[at]} tokens, where 0 to {most[at]} were asked for")
        total = int(paths.sum())
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.shape != (total,):
            raise self._nonsense(f"{tokens!r:.100} are no {total} tokens in int32")
        return paths, tokens

    def _broken(self, call: str, error: BaseException) -> PluginError:
        return PluginError(DRAFTERS, self._name, "", f"its {call} raised {type(error).__name__}: {error}")

    def _nonsense(self, problem: str) -> PluginError:
        return PluginError(DRAFTERS, self._name, "", f"its propose returned nonsense: {problem}")
