"""The sequences of a trainer's batch, for attention: their places in the batch, and in blocks as a rollout has them.

`HostSegments` attends on a CPU, `device_segments.py` on a GPU. Knows no modules and no gradients. Made once for each
forward pass by `trainer.py`; used by each layer's attention, and again in the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from fdasync_transformers.fixed.attention import KEYS, attend_blocks
from fdasync_transformers.model.ragged import RaggedPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync_transformers.model.kv import Reach
    from numpy.typing import NDArray

    from fdasync_trainer.replay.layout import Spans

# of this many parts of a batch, one may be padding
_PARTS_PADDING = 4


class Together(NamedTuple):
    """Sequences of similar lengths, to be computed as one batch that is padded behind them.

    Attributes:
        sequences, longest: S of them, and L, the tokens of the longest.
        rows: int64 [S * L], row of the flattened batch; padding repeats the sequence's last one. None: all rows of the
            flattened batch, as they stand.
        real: int64 [n], the places in `rows` that are no padding; None: all.
    """

    sequences: int
    longest: int
    rows: torch.Tensor | None
    real: torch.Tensor | None


class Segments(ABC):
    """See the module.

    Attributes:
        spans: first row and length of each sequence that has tokens, in the flattened batch.
        positions: int64 [R], of each row in its sequence; 0 of padding.
        rows: int64 [n], the rows that are no padding, one sequence behind the other.
        whole: whether no row is padding.
    """

    def __init__(self, spans: Spans, device: torch.device) -> None:
        real = spans.lengths > 0
        firsts, lengths = spans.offsets[real].astype(np.int64), spans.lengths[real].astype(np.int64)
        self.spans = tuple(zip(firsts.tolist(), lengths.tolist(), strict=True))
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = within + np.repeat(firsts, lengths)
        positions = np.zeros(spans.total, np.int64)
        positions[rows] = within
        self.positions = torch.from_numpy(positions).to(device)
        self.rows = torch.from_numpy(rows).to(device)
        self.whole = len(rows) == spans.total
        self._total = spans.total
        self._device = device
        self._together: dict[int | None, tuple[Together, ...]] = {}

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        reach: Reach,
        scaling: float,
        sinks: torch.Tensor | None,
        *,
        latent: bool = False,
    ) -> torch.Tensor:
        """Queries [R, H, Dk], keys [R, KH, Dk], values [R, KH, Dv] of the batch's rows: [R, H, Dv], zeros of padding.

        `latent`: the values are the leading part of the keys. Without gradients.
        """

    def together(self, most_scores: int | None = None) -> tuple[Together, ...]:
        """All sequences in few batches, at most a quarter of them padding; the same batches whenever it is called.

        `most_scores`: S * L * L of a batch of several sequences.
        """
        if most_scores not in self._together:
            self._together[most_scores] = tuple(self._batches(most_scores))
        return self._together[most_scores]

    def _batches(self, most_scores: int | None) -> Iterator[Together]:
        rest = sorted(self.spans, key=lambda span: -span[1])
        while rest:
            longest = rest[0][1]
            lengths = np.array([length for _, length in rest])
            counts = np.arange(1, len(rest) + 1)
            fits = _PARTS_PADDING * (counts * longest - lengths.cumsum()) <= counts * longest
            if most_scores is not None:
                fits &= (counts == 1) | (counts * longest**2 <= most_scores)
            # the longest come first: padding grows with each one
            count = int(fits.sum())
            chosen, rest = sorted(rest[:count]), rest[count:]
            yield self._batch(np.array(chosen), longest)

    def _batch(self, spans: NDArray[np.int64], longest: int) -> Together:
        lengths = spans[:, 1:]
        within = np.arange(longest)[None]
        rows = (spans[:, :1] + np.minimum(within, lengths - 1)).reshape(-1)
        if len(rows) == self._total and (rows == np.arange(self._total)).all():
            return Together(len(spans), longest, None, None)
        real = None
        if (lengths < longest).any():
            real = torch.from_numpy(np.flatnonzero(within < lengths)).to(self._device)
        return Together(len(spans), longest, torch.from_numpy(rows).to(self._device), real)


class HostSegments(Segments):
    """See `Segments`; computed as `FixedPaging` does: the same tiles."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        super().__init__(spans, device)
        lengths = np.array([length for _, length in self.spans], np.int64)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        blocks = -(-lengths // KEYS)
        ends = np.cumsum(blocks)
        self._num_blocks = int(blocks.sum())
        self._slots = torch.from_numpy(within + np.repeat((ends - blocks) * KEYS, lengths)).to(device)
        columns = np.arange(blocks.max(initial=0))
        # a plan reads none past the end of a sequence
        tables = (ends - blocks)[:, None] + columns
        zeros = np.zeros_like(lengths)
        self._plan = RaggedPlan(lengths, zeros, tables, KEYS, device, torch.float32, KEYS) if len(lengths) else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        reach: Reach,
        scaling: float,
        sinks: torch.Tensor | None,
        *,
        latent: bool = False,
    ) -> torch.Tensor:
        del latent
        result = query.new_zeros(*query.shape[:2], value.shape[2])
        if self._plan is not None:
            out = query.new_empty(len(self.rows), *result.shape[1:])
            groups = self._plan.groups(reach)
            rows = query.index_select(0, self.rows)
            attend_blocks(groups, rows, self._blocks(key), self._blocks(value), scaling, sinks, out)
            result.index_copy_(0, self.rows, out)
        return result

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[blocks, KEYS, KH, D], zeros behind the end of a sequence."""
        flat = rows.new_zeros(self._num_blocks * KEYS, *rows.shape[1:])
        return flat.index_copy_(0, self._slots, rows.index_select(0, self.rows)).view(-1, KEYS, *rows.shape[1:])
