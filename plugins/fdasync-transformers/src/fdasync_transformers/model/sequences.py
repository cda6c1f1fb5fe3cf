"""The sequences of a step, as a host sees them that computes it. Made by `execution/step_shape.py`; knows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Sequences(NamedTuple):
    """Those with tokens in a step, int64 [S] each; the first `decodes` decode. Between their rows there may be padding.

    Attributes:
        lanes: of each.
        starts: position of its first token.
        counts: its tokens, drafts included.
        first_rows: its first row of the step.
        rows: int64 [n], the rows of all of them.
    """

    lanes: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    decodes: int
    rows: NDArray[np.int64]
