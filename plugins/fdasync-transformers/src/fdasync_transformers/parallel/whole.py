"""The whole tensors of a model whose parts the ranks of a group hold; and what the ranks agree on.

Rank 0 gathers one tensor after the other, so that what names weights does not depend on the number of ranks. All ranks
go through the same tensors in the same order. Knows tensors; knows no folders. Called by the room `weights`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fdasync_transformers.model.kept.kept import Kept
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.parallel.cuts import Cut

# of the rows that all ranks give at once
_BAND_NBYTES = 16 << 20


def whole_tensors(
    state: Mapping[str, torch.Tensor | Kept], cuts: Mapping[str, Cut], collectives: Collectives | None
) -> Iterator[tuple[str, torch.Tensor | Kept]]:
    """The tensors of a state dict by name, sorted: whole at rank 0, one at a time. Every rank goes through all.

    Args:
        cuts: of the tensors that ranks hold parts of.
        collectives: of the group; None: this process holds all.
    """
    for name, tensor in sorted(state.items()):
        cut = cuts.get(name)
        yield name, tensor if cut is None or collectives is None else gathered(tensor, cut, collectives, name)


def gathered(tensor: torch.Tensor | Kept, cut: Cut, collectives: Collectives, name: str) -> torch.Tensor:
    """The whole of a tensor, in host memory at rank 0; what other ranks get has no meaning. Holds no more than the
    whole and some rows."""
    shape = cut.whole_shape(tuple(tensor.shape))
    whole = torch.empty(shape if not collectives.rank else (0,), dtype=tensor.dtype)
    cuts = [cut.of_rank(rank, collectives.ranks) for rank in range(collectives.ranks)]
    # each part has as many rows as the whole, or the rows of its runs
    rows = [(0, len(tensor))] if cut.dim else [(here, count) for here, _, count in cut.runs(shape[0])]
    for begin, count in rows:
        for first, last in _bands(tensor, begin, begin + count):
            parts = collectives.gather(tensor[first:last], name)
            for one, part in zip(cuts, parts, strict=True):
                if not collectives.rank:
                    _give(whole, one, first, part)
    return whole


def agree(collectives: Collectives | None, problem: str, label: str) -> str:
    """The problems of all ranks, named by their rank, for people; "" where no rank has one.

    Without a group, the problem itself.
    """
    if collectives is None:
        return problem
    told = [message.decode(errors="replace") for message in collectives.tell(problem.encode()[:4000], label)]
    # a problem that all have is no rank's own
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"rank {rank} of {len(told)}: {one}" for rank, one in enumerate(told) if one)


def _bands(tensor: torch.Tensor | Kept, begin: int, end: int) -> Iterator[tuple[int, int]]:
    each = max(1, _BAND_NBYTES // max(1, tensor[0].nbytes))
    for first in range(begin, end, each):
        yield first, min(first + each, end)


def _give(whole: torch.Tensor, cut: Cut, first: int, rows: torch.Tensor) -> None:
    """Put rows `first` and further ones of a part to their place in the whole."""
    for here, there, count in cut.runs(whole.shape[cut.dim]):
        if cut.dim:
            place = whole[first : first + len(rows)].narrow(cut.dim, there, count)
            place.copy_(rows.narrow(cut.dim, here, count))
        elif here <= first < here + count:
            whole[there + first - here : there + first - here + len(rows)] = rows
