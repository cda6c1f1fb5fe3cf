"""A step's shape on its device: which rows it has, whose they are, and how they attend.

The host sends a few numbers for each sequence (`batch_arrays`); `DeviceBatch` names them where the model computes.
Knows no model and no kernels. Used by the step models, by what replays them and by the parts of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fdasync_transformers.model.sequences import Sequences

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from fdasync_kernels.recurrence.spans import Spans
    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.model.recurrent.pieces import Take

#: how a step's tokens attend. "both": sequences that decode by the kernel for one query, others in tiles. "decodes":
#: every token as a decode of its own; a layer writes the KV of all tokens before any of them attends, so the tokens of
#: one sequence see each other. "tiles": every sequence in tiles.
Way = Literal["both", "decodes", "tiles"]


class Passed(NamedTuple):
    """A step's pass.

    Attributes:
        logits: [N, V] of the rows asked for, in the model's dtype.
        states: hidden states [T, D] that multi-token prediction layers go on from; empty: the model has none.
    """

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class DeviceBatch:
    """A step's shape, on the device: T tokens of S sequences, decodes first.

    Attributes:
        tokens: T.
        decodes: how many sequences, the first ones, have one token each.
        lanes: int32 [S]; -1: padding.
        starts: int64 [S], position of each sequence's first token here.
        first_rows: int32 [S + 1], row of each sequence's first token, and T.
        counts: int32 [S], tokens of each sequence; None where all are decodes.
        tiles: int32 [n, 2] of `prefill_tiles`, of the sequences that are no decodes; None where all are, and where no
            kernel attends.
        rows: int64 [N], rows whose logits are wanted; None: all.
        padded: whether rows may belong to no sequence.
        runs: whether decodes may be several rows of one sequence, side by side.
        spans: of recurrent layers, for kernels; None: the model has none.
        takes: snapshots of recurrent state behind tokens of the step, where no kernel computes it.
        tell: is called with what each indexer picks (`model/indexers.py`); None: no sequence asks for that.
    """

    tokens: int
    decodes: int
    lanes: torch.Tensor
    starts: torch.Tensor
    first_rows: torch.Tensor
    counts: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    padded: bool = False
    runs: bool = False
    spans: Spans | None = None
    takes: tuple[Take, ...] = ()
    tell: Callable[[int, torch.Tensor], None] | None = None


def batch_arrays(batch: Batch, rows: NDArray[np.int64], way: Way = "both") -> dict[str, NDArray[np.generic]]:
    """The arrays of a step's shape that are sent to the device, by the names that `device_batch` takes.

    Args:
        rows: rows of the step whose logits are wanted.
    """
    tokens = len(batch.positions)
    if way == "decodes":
        arrays: dict[str, NDArray[np.generic]] = {
            "lanes": np.repeat(batch.lanes, batch.counts).astype(np.int32),
            "starts": batch.positions,
            "first_rows": np.arange(tokens + 1, dtype=np.int32),
        }
    else:
        arrays = {
            "lanes": batch.lanes.astype(np.int32),
            "starts": batch.starts,
            "first_rows": np.concatenate([[0], np.cumsum(batch.counts)]).astype(np.int32),
        }
        if way == "tiles" or batch.num_decodes < len(batch.lanes):
            arrays["counts"] = batch.counts.astype(np.int32)
    if len(rows) < tokens or way == "tiles":
        arrays["rows"] = rows
    return arrays


def device_batch(
    batch: Batch,
    sent: dict[str, torch.Tensor],
    way: Way = "both",
    *,
    runs: bool = False,
    spans: Spans | None = None,
    takes: tuple[Take, ...] = (),
    tell: Callable[[int, torch.Tensor], None] | None = None,
) -> DeviceBatch:
    """The shape of a step, from the tensors of `batch_arrays` on the device. The rest is as of a `DeviceBatch`."""
    tokens = len(batch.positions)
    return DeviceBatch(
        tokens=tokens,
        decodes={"both": batch.num_decodes, "decodes": tokens, "tiles": 0}[way],
        lanes=sent["lanes"],
        starts=sent["starts"],
        first_rows=sent["first_rows"],
        counts=sent.get("counts"),
        tiles=sent.get("tiles"),
        rows=sent.get("rows"),
        runs=runs,
        spans=spans,
        takes=takes,
        tell=tell,
    )


def sequences_of(batch: DeviceBatch) -> Sequences:
    """Of a step on a CPU. Entries of one sequence side by side, its drafts, are one sequence here."""
    lanes = batch.lanes.numpy().astype(np.int64)
    starts, firsts = batch.starts.numpy(), batch.first_rows.numpy().astype(np.int64)
    counts = firsts[1:] - firsts[:-1]
    used = (lanes >= 0) & (counts > 0)
    if not batch.runs and used.all():
        return Sequences(lanes, starts, counts, firsts[:-1], batch.decodes, np.arange(batch.tokens))
    begins = used.copy()
    begins[1:] &= ~(used[:-1] & (lanes[1:] == lanes[:-1]) & (starts[1:] == starts[:-1] + counts[:-1]))
    first = np.flatnonzero(begins)
    owner = np.cumsum(begins)[used] - 1
    return Sequences(
        lanes=lanes[first],
        starts=starts[first],
        counts=np.bincount(owner, counts[used], len(first)).astype(np.int64),
        first_rows=firsts[first],
        decodes=int(begins[: batch.decodes].sum()),
        rows=np.flatnonzero(np.repeat(used, counts)),
    )
