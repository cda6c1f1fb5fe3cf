"""The grammars of the synthetic model, in closed form: what may be sampled depends on every token of the answer so far.

A grammar of kind "regex" says `%M`: each token makes the sum of the answer's tokens a multiple of M. `%M{N}` ends the
answer after N tokens: EOS alone can follow. `%M!N` cannot be kept beyond N tokens, as a grammar that meets a limit of
its library. A matcher that missed a token, or took one twice, samples others. `steps.py` and
`oracle.py` use it.
"""

from __future__ import annotations

import re
from copy import copy
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.request import Grammar


class Rule(msgspec.Struct, frozen=True):
    """A grammar, read.

    Attributes:
        modulus: of the sums.
        most: tokens before EOS; -1: any number.
        breaks_at: tokens after which it cannot be kept; -1: it always can.
    """

    modulus: int
    most: int = -1
    breaks_at: int = -1


def rule_of(grammar: Grammar, vocab_size: int, eos_id: int) -> Rule:
    """Raises BadInput for a grammar that the synthetic model does not know, or that leaves it no token."""
    found = re.fullmatch(r"%([0-9]{1,6})(?:\{([0-9]{1,6})\}|!([0-9]{1,6}))?", grammar.text)
    if grammar.kind != "regex" or found is None:
        raise BadInput("grammar", f"{grammar.text!r:.100} is none of the synthetic model", limit="%M, %M{N}, %M!N")
    modulus, most, breaks_at = (int(part or -1) for part in found.groups())
    # two candidates at least, so one is not EOS
    if not 0 < modulus <= vocab_size // 2:
        raise BadInput("grammar", f"a modulus of {modulus}", limit=f"1 to {vocab_size // 2}")
    if most >= 0 and eos_id < 0:
        raise BadInput("grammar", "ends with EOS, and this model has none", hint="give no {N}")
    return Rule(modulus, most, breaks_at)


class Matcher:
    """A grammar and the tokens of one answer so far.

    Attributes:
        key: the sequence.
    """

    def __init__(self, key: int, rule: Rule, vocab_size: int, eos_id: int, tokens: Iterable[int] = ()) -> None:
        self.key = key
        self._rule = rule
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._sum = 0
        self._count = 0
        for token in tokens:
            self._accept(token)

    def fork(self) -> Matcher:
        """Another one of the same answer so far."""
        return copy(self)

    @property
    def is_broken(self) -> bool:
        """Whether the grammar cannot be kept any further."""
        return self._count == self._rule.breaks_at

    def take(self, token: int) -> int:
        """Go on with the allowed token that follows `token` most closely, itself included, from 0 on behind the last
        one; returns it."""
        rule, size = self._rule, self._vocab_size
        if self._count == rule.most:
            token = self._eos_id
        else:
            while (self._sum + token) % rule.modulus or token == self._eos_id:
                token = (token + 1) % size
        self._accept(token)
        return token

    def _accept(self, token: int) -> None:
        self._sum += token
        self._count += 1
