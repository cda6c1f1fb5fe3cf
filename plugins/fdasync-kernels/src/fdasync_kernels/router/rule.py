"""What a router does with its logits, as data: score, selection, groups, weights.

Order: scores of the logits; the selection compares the scores or the logits, plus a bias if there is one; groups of
experts may be closed; the k largest are chosen; their weights are the scores without the bias, then renormalised, then
scaled. Knows no models and no tensors. Used by `route.py`; made by the plugins' fused routers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fdasync.errors import BadInput

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_of_chosen"]
Closed = Literal["never", "zero"]

SCORE_CODES: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "softmax_of_chosen": 3}


class RouterRule(msgspec.Struct, frozen=True):
    """How k experts and their weights follow from the logits of a token.

    Attributes:
        score: of an expert. "softmax_of_chosen" is over the logits of the chosen ones, and the choice is by logits.
        by_logits: the selection compares logits; else scores. Without a bias and without groups it makes no difference
            but at scores that round to the same, where logits tell more.
        groups: of as many experts each, in the order of ids; 1: none.
        open_groups: how many groups, of the highest scores, stay open.
        group_score: of the two largest scores of the selection, or the largest alone.
        closed: experts of closed groups are never chosen, or compare as 0.0.
        renormalise: divide the weights by their sum.
        least_sum: with `renormalise`: added to the sum, or the least that the sum counts as, by `clamp_sum`.
        clamp_sum: see `least_sum`.
        scale: of the weights, at last.
        rounded: scores and weights are rounded to the dtype of the logits after each operation; else float32
            throughout.
    """

    score: Score = "softmax"
    by_logits: bool = True
    groups: int = 1
    open_groups: int = 1
    group_score: Literal["two_largest", "largest"] = "two_largest"
    closed: Closed = "never"
    renormalise: bool = True
    least_sum: float = 0.0
    clamp_sum: bool = False
    scale: float = 1.0
    rounded: bool = False

    @property
    def grouped(self) -> bool:
        """Whether groups can change the choice."""
        return self.open_groups < self.groups

    def check(self, experts: int, k: int) -> None:
        """Raise BadInput unless this rule can choose k of so many experts."""
        if not 1 <= self.open_groups <= self.groups or experts % self.groups:
            raise BadInput("rule", f"{self.open_groups} of {self.groups} groups of {experts} experts stay open")
        size = experts // self.groups
        if self.grouped and self.open_groups * size < k:
            raise BadInput("rule", f"{self.open_groups} groups of {size} experts hold fewer than k", limit=k)
        if self.grouped and self.group_score == "two_largest" and size < 2:
            raise BadInput("rule", "a group of one expert has no two largest scores")
        if self.grouped and self.by_logits:
            raise BadInput("rule", "groups are chosen by scores, so experts are too")
        if self.score == "softmax_of_chosen" and not self.by_logits:
            raise BadInput("rule", "a score of the chosen ones cannot choose them")
