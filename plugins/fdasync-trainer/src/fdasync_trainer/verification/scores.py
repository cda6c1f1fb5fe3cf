"""How far a choice is from the choice of a reference: pure arithmetic on scores.

A choice of experts or of a token that differs from the reference's may still be as good: float rounding can order two
near-equal scores either way. The distance is how far the worst swapped item is from the boundary between chosen and not
chosen, over the largest score. Knows no model. Called by `verify.py`.
"""

from __future__ import annotations

from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

TOLERANCE = 1e-5
# DeepSeek-V3 has 70 ways to keep 4 of 8 groups
_MAX_GROUP_CHOICES = 20_000

Floats = np.ndarray[Any, np.dtype[np.float64]]


def choice_distance(scores: Floats, chosen: Collection[int]) -> float:
    """Distance of a set from the top `len(chosen)` of `scores` [E], relative to the largest score.

    The distance of a wrongly chosen item is that below the lowest score of the top set, the distance of a left-out item
    that above the highest score outside of the top set. 0 for a top set, also where equals could be chosen either way.
    -inf scores cannot be chosen.
    """
    ordered = np.sort(scores)[::-1]
    count = len(chosen)
    lowest_in = ordered[count - 1]
    highest_out = ordered[count] if count < len(ordered) else -np.inf
    inside = np.zeros(len(scores), dtype=bool)
    inside[list(chosen)] = True
    brought_in = scores[inside & (scores < lowest_in)]
    left_out = scores[~inside & (scores > highest_out)]
    worst = 0.0
    if brought_in.size:
        worst = float(lowest_in - brought_in.min())
    if left_out.size:
        worst = max(worst, float(left_out.max() - highest_out))
    return _relative(worst, float(ordered[0]))


def grouped_distance(scores: Floats, group_scores: Floats, groups_kept: int, chosen: Collection[int]) -> float:
    """The distance of a set where experts come from the best `groups_kept` groups only.

    Args:
        scores: [E], group mask not applied; group g has E/G neighbouring experts.
        group_scores: [G].
        groups_kept: how many groups are open.
        chosen: the set.

    Tries every choice of groups that contains the set, and takes the larger of the distances of the groups, on their
    scores, and of the set within them. The smallest result counts; inf if no choice of groups contains the set.
    """
    size = len(scores) // len(group_scores)
    needed = {expert // size for expert in chosen}
    if len(needed) > groups_kept:
        return float("inf")
    others = [int(group) for group in np.argsort(-group_scores, kind="stable") if int(group) not in needed]
    best = float("inf")
    for extra in islice(combinations(others, groups_kept - len(needed)), _MAX_GROUP_CHOICES):
        kept = needed.union(extra)
        distance = choice_distance(group_scores, kept)
        if distance < best:
            is_open = np.isin(np.arange(len(scores)) // size, list(kept))
            best = min(best, max(distance, choice_distance(np.where(is_open, scores, -np.inf), chosen)))
    return best


def token_distance(logits: Floats, token: int) -> float:
    """How far a token's logit lies below the largest, relative to it."""
    largest = float(logits.max())
    return _relative(largest - float(logits[token]), largest)


def _relative(distance: float, largest: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / abs(largest) if largest else float("inf")
