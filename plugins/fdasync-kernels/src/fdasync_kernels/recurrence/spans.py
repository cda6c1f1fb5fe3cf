"""Where the sequences of a step find their states, and where they leave them.

States lie in one memory [rows, ...]: a row for each running sequence, and others for copies of states (snapshots). A
*span* is one sequence's rows in a step. It begins from the state in one row of the memory, or from zeros, and leaves
its state in others behind some of its tokens: its *stops*, in rising order. The last one is behind its last token, in
the row that the sequence goes on from. So a snapshot in the midst of a step costs no second pass.

All of a plan's numbers are one int32 tensor of a fixed size, so that a captured graph reads the numbers of each step.
Knows no models and no layers. Used by the kernels beside it; plans are made by the plugins' GPU runners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fdasync.errors import BadInput, InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: in the place of a source: the state is zeros; there is no sequence
FRESH, ABSENT = -1, -2


@dataclass(frozen=True)
class PlanSize:
    """How many numbers a plan has.

    Attributes:
        sequences: most sequences of a step.
        stops: most stops of all of them.
    """

    sequences: int
    stops: int

    @property
    def numbers(self) -> int:
        """How many numbers the plan's tensor has."""
        return 3 * self.sequences + 2 + 2 * self.stops


@dataclass(frozen=True)
class Spans:
    """A step's plan on the device.

    Attributes:
        sources: int32 [S], the memory's row that each sequence's state is read from; `FRESH` or `ABSENT`.
        first_rows: int32 [S + 1], the step's row of each sequence's first token, and of the end.
        first_stops: int32 [S + 1], where each sequence's stops begin, and their end.
        stops: int32 [stops, 2], the row behind the last row that counts, and the memory's row that the state goes to.
        owners: int32 [T], the sequence of each row; -1: padding. None: each sequence has one row, in their order.
    """

    sources: torch.Tensor
    first_rows: torch.Tensor
    first_stops: torch.Tensor
    stops: torch.Tensor
    owners: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: torch.Tensor, size: PlanSize, owners: torch.Tensor | None, sequences: int) -> Spans:
        """Views of a plan's tensor; the first `sequences` of it."""
        if plan.dtype is not torch.int32 or tuple(plan.shape) != (size.numbers,):
            raise BadInput("plan", f"{plan.dtype} {tuple(plan.shape)} where int32 [{size.numbers}] was expected")
        count = size.sequences
        sources, rest = plan[:count], plan[count:]
        first_rows, rest = rest[: count + 1], rest[count + 1 :]
        first_stops, stops = rest[: count + 1], rest[count + 1 :]
        return cls(
            sources[:sequences], first_rows[: sequences + 1], first_stops[: sequences + 1], stops.view(-1, 2), owners
        )


def plan_spans(
    size: PlanSize,
    sources: NDArray[np.integer],
    counts: NDArray[np.integer],
    targets: NDArray[np.integer],
    takes: Sequence[tuple[int, int, int]] | NDArray[np.int64] = (),
) -> NDArray[np.int32]:
    """The numbers of a plan.

    Args:
        sources: [S], as in `Spans`.
        counts: [S], rows of each sequence, 1 or more.
        targets: [S], the memory's row that each sequence's state behind its last row goes to.
        takes: [n, 3], further stops: sequence, how many of its rows count, and the memory's row.

    Raises:
        InvariantBroken: more than the plan's size; a stop outside of its sequence; two stops in one row of the memory,
            or one in a row that another sequence begins from.
    """
    sequences = len(sources)
    if sequences > size.sequences or sequences + len(takes) > size.stops:
        raise InvariantBroken(f"{sequences} sequences with {len(takes)} snapshots, for {size}")
    first_rows = np.zeros(sequences + 1, np.int64)
    np.cumsum(counts, out=first_rows[1:])
    numbers, behind, rows = np.arange(sequences), counts, targets
    if len(takes):
        more = np.asarray(takes, np.int64)
        inside = (more[:, 0] >= 0) & (more[:, 0] < sequences) & (more[:, 1] >= 1)
        inside[inside] = more[inside, 1] <= counts[more[inside, 0]]
        if not inside.all():
            number, count, _ = more[int(inside.argmin())].tolist()
            raise InvariantBroken(f"a snapshot behind row {count} of sequence {number}, which the step does not have")
        numbers = np.concatenate([numbers, more[:, 0]])
        behind, rows = np.concatenate([behind, more[:, 1]]), np.concatenate([rows, more[:, 2]])
    written = set(rows.tolist())
    if len(written) != len(rows):
        raise InvariantBroken("a step leaves two states in one place")
    if not written.isdisjoint(sources[(sources >= 0) & (sources != targets)].tolist()):
        # programs of one launch do both, in any order
        raise InvariantBroken("a step writes a state that another sequence of it begins from")
    # of one position, the state that goes on is written last: it may lie where the sequence began from
    if len(takes):
        order = np.lexsort((np.arange(len(rows)) < sequences, behind, numbers))
        numbers, behind, rows = numbers[order], behind[order], rows[order]
    plan = np.zeros(size.numbers, np.int32)
    plan[: size.sequences] = ABSENT
    plan[:sequences] = sources
    at = size.sequences
    plan[at : at + sequences + 1] = first_rows
    at += size.sequences + 1
    plan[at : at + sequences + 1] = np.searchsorted(numbers, np.arange(sequences + 1))
    at += size.sequences + 1
    plan[at : at + 2 * len(rows)] = np.stack([first_rows[numbers] + behind, rows], 1).ravel()
    return plan
