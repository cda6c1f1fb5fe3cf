"""Steps are cut where sequences end and where snapshots are taken; decodes are computed together."""

from __future__ import annotations

import numpy as np
import pytest
from fdasync_transformers.model.recurrent.pieces import Piece, Pieces, Take, cut
from fdasync_transformers.model.sequences import Sequences

from fdasync.errors import InvariantBroken


def step(*sequences: tuple[int, int, int], decodes: int = 0) -> Sequences:
    """(lane, start, count) of each."""
    lanes, starts, counts = (np.array(column, np.int64) for column in zip(*sequences, strict=True))
    return Sequences(lanes, starts, counts, np.cumsum(counts) - counts, decodes, np.arange(counts.sum()))


def test_decodes_are_together_and_chunks_alone() -> None:
    pieces = cut(step((2, 9, 1), (0, 4, 1), (1, 0, 6), (3, 5, 1), decodes=2), ())
    assert pieces == Pieces(
        (Piece(2, 1, False, -1), Piece(0, 1, False, -1)), (Piece(1, 6, True, -1), Piece(3, 1, False, -1))
    )


def test_a_chunk_is_cut_at_its_snapshots() -> None:
    takes = [Take(1, 12, 5), Take(0, 8, 3), Take(1, 4, 0), Take(2, 16, 9)]
    pieces = cut(step((2, 15, 1), (0, 4, 4), (1, 0, 13), decodes=1), takes)
    assert pieces.singles == (Piece(2, 1, False, 9),)
    assert pieces.others == (
        Piece(0, 4, False, 3), Piece(1, 4, True, 0), Piece(1, 8, False, 5), Piece(1, 1, False, -1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("takes", "problem"),
    [
        ([Take(0, 4, 1)], "has no tokens 4 to 4"),
        ([Take(0, 9, 1)], "has no tokens 4 to 9"),
        ([Take(0, 6, 1), Take(0, 6, 2)], "has no tokens 6 to 6"),
        ([Take(0, 6, 1), Take(0, 7, 1)], "two snapshots in one place"),
        ([Take(3, 6, 1)], "lanes \\[3\\], and computes none"),
    ],
)
def test_snapshots_of_other_tokens_are_refused(takes: list[Take], problem: str) -> None:
    with pytest.raises(InvariantBroken, match=problem):
        cut(step((0, 4, 4)), takes)
