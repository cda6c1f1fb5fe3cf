"""Which cases of a long list stay in the first ring."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def kept(cases: Sequence[Mapping[str, object]], count: int) -> list[int]:
    """The places of `count` cases, or of all; a case is its arguments by name. One after the other the case whose
    values were kept least often, and then whose pairs of values were: of a list of 3 values and one of 4 all are there
    with four cases, and one error of each kind before a second one. Of values that are all different the first are
    kept."""
    values = [_values(case) for case in cases]
    pairs = [list(combinations(case, 2)) for case in values]
    times: Counter[object] = Counter()

    def seen(place: int) -> tuple[int, int]:
        return sum(times[value] for value in values[place]), sum(times[pair] for pair in pairs[place])

    places: list[int] = []
    rest = list(range(len(cases)))
    while rest and len(places) < count:
        place = min(rest, key=seen)
        rest.remove(place)
        places.append(place)
        times.update(values[place])
        times.update(pairs[place])
    return places


def _values(case: Mapping[str, object]) -> list[tuple[str, object]]:
    # others need not be hashable, and are the same in all cases of their list; 0 and False are two values
    plain = (str, bytes, int, float, type)
    return [(name, (type(one), one) if isinstance(one, plain) else id(one)) for name, one in case.items()]
