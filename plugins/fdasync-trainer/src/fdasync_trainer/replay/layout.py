"""Finds the sequences of a trainer's batch: which token of a forward pass is which position of which sequence.

A caller gives the layout (`Padded`, `Packed`), or it is read off a pass's arguments where these leave no doubt.
Sequences are whole, from position 0 on, and each lies in one piece of the flattened batch; all other tokens are
padding. Knows no rows and no routers. Called by `batch.py`; the two classes are for training code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]

_HINT = "give layout=Padded(attention_mask) or layout=Packed(lengths)"


class Spans(msgspec.Struct, frozen=True):
    """The sequences of a flattened batch.

    Attributes:
        offsets: first token of each sequence.
        lengths: tokens of each sequence.
        total: tokens of the batch.
    """

    offsets: Ints
    lengths: Ints
    total: int


class Padded:
    """Sequences in the rows of a batch, padded on the left or on the right.

    Args:
        attention_mask: 0 or 1 [B, T], tensor or array; the ones of a row are its sequence, in one piece. Read once per
            forward pass (on a GPU that waits for the device; a CPU tensor or an array does not).
    """

    def __init__(self, attention_mask: Any) -> None:
        self.attention_mask = attention_mask

    def spans(self, batch: int, width: int) -> Spans:
        """The sequences of a batch. Raises `BadInput` for another shape, other values, or ones in several pieces."""
        mask = _array(self.attention_mask)
        if mask.shape != (batch, width):
            raise BadInput("layout", f"an attention mask of shape {mask.shape}", limit=f"the batch's {(batch, width)}")
        real = mask.astype(bool)
        if not np.array_equal(real, mask):
            raise BadInput("layout", "an attention mask with other values than 0 and 1", hint="give Packed(lengths)")
        lengths = real.sum(axis=1)
        firsts = real.argmax(axis=1)
        ends = width - real[:, ::-1].argmax(axis=1)
        broken = np.flatnonzero((lengths > 0) & (ends - firsts != lengths))
        if broken.size:
            raise BadInput("layout", f"the ones of row {broken[0]} of the attention mask are not in one piece")
        return Spans(np.arange(batch) * width + firsts, lengths, batch * width)


class Packed:
    """Sequences one after the other in a batch of one row; tokens past the last one are padding.

    Args:
        lengths: tokens of each sequence, in order.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def spans(self, batch: int, width: int) -> Spans:
        """The sequences of a batch. Raises `BadInput` for several rows, or for more tokens than the batch has."""
        lengths = _array(self.lengths)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
            raise BadInput("layout", "lengths that are not a flat list of counts")
        if batch != 1 or lengths.sum() > width:
            packed = f"{int(lengths.sum())} packed tokens in a batch of {batch} x {width}"
            raise BadInput("layout", packed, limit="one row that holds them")
        lengths = lengths.astype(np.int64)
        return Spans(np.cumsum(lengths) - lengths, lengths, width)


Layout = Padded | Packed


def derived(arguments: Mapping[str, Any], batch: int, width: int, *, hint: str = _HINT) -> Spans:
    """The layout by a pass's arguments, which are read in this order.

    `cu_seq_lens_q`: packed. In one row, `position_ids` that restart at 0: packed, within the ones of a mask if there is
    one. A 2-D `attention_mask`: padded. Neither: every row is a whole sequence. In several rows, `position_ids` only
    have to agree: 0, 1, 2 and so on in each sequence.

    Raises:
        BadInput: the arguments leave it open (a mask that is not 2-D, positions that do not count up from 0).
    """
    bounds = arguments.get("cu_seq_lens_q")
    if bounds is not None:
        table = _array(bounds)
        if table.ndim != 1 or table.dtype.kind not in "iu" or not table.size or table[0] != 0:
            raise BadInput("layout", "cu_seq_lens_q that is no flat list of token counts from 0 on", hint=hint)
        return Packed(np.diff(table.astype(np.int64)).tolist()).spans(batch, width)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        raise BadInput("layout", "the attention mask is not [B, T] and tells no sequences", hint=hint)
    if mask is not None:
        spans = Padded(mask).spans(batch, width)
    else:
        spans = Spans(np.arange(batch) * width, np.full(batch, width, dtype=np.int64), batch * width)
    if positions is None:
        return spans
    table = _array(positions)
    if table.ndim != 2 or table.shape[1] != width or table.shape[0] not in (1, batch):
        raise BadInput("layout", f"position_ids of shape {table.shape} tell no sequences", hint=hint)
    if batch > 1:
        for row, (first, length) in enumerate(zip(spans.offsets % width, spans.lengths, strict=True)):
            own = table[row % len(table), first : first + length]
            if not np.array_equal(own, np.arange(length)):
                problem = f"position_ids that do not count up from 0 in the sequence of row {row}"
                raise BadInput("layout", problem, hint=hint)
        return spans
    first = int(spans.offsets[0])
    own = table[0, first : first + int(spans.lengths[0])].astype(np.int64)
    starts = np.flatnonzero(own == 0)
    lengths = np.diff(np.append(starts, len(own)))
    if len(own) and (not starts.size or not np.array_equal(own, np.arange(len(own)) - np.repeat(starts, lengths))):
        raise BadInput("layout", "position_ids that do not count up from 0 in each sequence", hint=hint)
    return Spans(first + starts, lengths, width) if len(own) else spans


def _array(values: Any) -> np.ndarray[Any, np.dtype[Any]]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
