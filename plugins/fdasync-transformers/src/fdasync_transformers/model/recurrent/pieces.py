"""Cuts a step into pieces: runs of tokens of one sequence that a mixer computes in one call.

A piece ends where the sequence's tokens of the step end, and where a snapshot is taken. Sequences that decode are one
piece together, a token each; those with drafts several, one after the other. Knows no modules and no state. Called by
`steps.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.model.sequences import Sequences


class Take(NamedTuple):
    """A snapshot of a lane's state behind `position` tokens, and its place."""

    lane: int
    position: int
    place: int


class Piece(NamedTuple):
    """Tokens of one sequence.

    Attributes:
        lane: of the sequence.
        num_tokens: how many.
        fresh: they are its first ones.
        place: of the snapshot at their end; -1: none is taken.
    """

    lane: int
    num_tokens: int
    fresh: bool
    place: int


class Pieces(NamedTuple):
    """A step, in the order of its tokens.

    Attributes:
        singles: decodes, a token each, or several where drafts are verified.
        others: of the tokens behind them.
    """

    singles: tuple[Piece, ...]
    others: tuple[Piece, ...]


def cut(step: Sequences, takes: Sequence[Take]) -> Pieces:
    """Raises InvariantBroken for snapshots of tokens that the step does not compute, and of one place twice."""
    of_lane: dict[int, list[Take]] = {}
    for take in sorted(takes, key=lambda one: one.position):
        of_lane.setdefault(take.lane, []).append(take)
    if len({take.place for take in takes}) != len(takes):
        raise InvariantBroken("a step takes two snapshots in one place")
    pieces: list[list[Piece]] = []
    # in host memory
    for lane, start, count in zip(step.lanes.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
        own: list[Piece] = []
        at, end = start, start + count
        for take in of_lane.pop(lane, ()):
            if not at < take.position <= end:
                raise InvariantBroken(f"a step has no tokens {at} to {take.position} for a snapshot")
            own.append(Piece(lane, take.position - at, at == 0, take.place))
            at = take.position
        if at < end:
            own.append(Piece(lane, end - at, at == 0, -1))
        pieces.append(own)
    if of_lane:
        raise InvariantBroken(f"a step takes snapshots of lanes {sorted(of_lane)}, and computes none")
    decodes = pieces[: step.decodes]
    alone = all(len(own) == 1 and not own[0].fresh for own in decodes)
    flat = [piece for own in pieces for piece in own]
    together = len(decodes) if alone else 0
    return Pieces(tuple(flat[:together]), tuple(flat[together:]))
