"""Kernels that prepare what changes logits before they are sampled: penalties, logit bias and stop masks.

Only the cells that change are written: a row of edits is a bit for each id and, where the bit is set, the value that
stands for the logit. So thousands of known tokens cost thousands of cells, not a pass over the vocabulary. Knows no
requests. Called by `sample.py`; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import triton
import triton.language as tl

from fdasync_kernels.sampling.tile import EDIT, ROW, STOP, TILE, bits_of, edited, job_int, read_raw

if TYPE_CHECKING:
    from collections.abc import Mapping

_CELLS = 256


class SampleJobs(Protocol):
    """What the host knows of a step: `sample_rows` of `sample.py` says what each is."""

    @property
    def count(self) -> int: ...
    @property
    def jobs(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def edited(self) -> int: ...
    @property
    def stopped(self) -> int: ...
    @property
    def masked(self) -> int: ...
    @property
    def masses(self) -> bool: ...
    @property
    def nuclei(self) -> bool: ...
    @property
    def most(self) -> int: ...
    @property
    def most_tops(self) -> int: ...


@triton.jit
def _set_bit(words, slot, columns, ids, mask):
    tl.atomic_or(words + slot * columns + (ids >> 5), 1 << (ids & 31), mask=mask)


@triton.jit(do_not_specialize=["tokens_stride"])
def _clear_kernel(edits, tokens, tokens_stride, counts, width, cells: tl.constexpr):
    """Zero the counts of the known tokens."""
    number = tl.program_id(0)
    slot = tl.load(edits + number * 5)
    lane = tl.load(edits + number * 5 + 2)
    end = tl.load(edits + number * 5 + 3)
    place = tl.program_id(1) * cells + tl.arange(0, cells)
    ids = tl.load(tokens + lane * tokens_stride + place, mask=place < end, other=-1)
    tl.store(counts + slot * width + ids, 0, mask=(ids >= 0) & (ids < width))


@triton.jit(do_not_specialize=["tokens_stride"])
def _count_kernel(edits, tokens, tokens_stride, counts, bits, bit_columns, width, cells: tl.constexpr):
    """Count the tokens of the output, and mark the tokens of prompt and output as seen."""
    number = tl.program_id(0)
    slot = tl.load(edits + number * 5)
    lane = tl.load(edits + number * 5 + 2)
    end = tl.load(edits + number * 5 + 3)
    prompt = tl.load(edits + number * 5 + 4)
    place = tl.program_id(1) * cells + tl.arange(0, cells)
    ids = tl.load(tokens + lane * tokens_stride + place, mask=place < end, other=-1)
    here = (ids >= 0) & (ids < width)
    tl.atomic_add(counts + slot * width + ids, 1, mask=here & (place >= prompt))
    _set_bit(bits, slot, bit_columns, ids, here)


@triton.jit(do_not_specialize=["tokens_stride", "logits_stride"])
def _penalise_kernel(
    edits, penalties, tokens, tokens_stride, counts, logits, logits_stride, values, width, cells: tl.constexpr
):
    """Write the penalised logits: repetition (arXiv 1909.05858), then presence and frequency.

    A token that is there twice is written twice alike.
    """
    number = tl.program_id(0)
    slot = tl.load(edits + number * 5)
    row = tl.load(edits + number * 5 + 1)
    lane = tl.load(edits + number * 5 + 2)
    end = tl.load(edits + number * 5 + 3)
    repetition = tl.load(penalties + number * 3)
    presence = tl.load(penalties + number * 3 + 1)
    frequency = tl.load(penalties + number * 3 + 2)
    place = tl.program_id(1) * cells + tl.arange(0, cells)
    ids = tl.load(tokens + lane * tokens_stride + place, mask=place < end, other=-1)
    here = (ids >= 0) & (ids < width)
    count = tl.load(counts + slot * width + ids, mask=here, other=0)
    x = tl.load(logits + row * logits_stride + ids, mask=here, other=0.0).to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    tl.store(values + slot * width + ids, x, mask=here)


@triton.jit(do_not_specialize=["count", "logits_stride"])
def _bias_kernel(cells_of, bias, count, logits, logits_stride, values, bits, bit_columns, width, cells: tl.constexpr):
    """Add to single logits, behind the penalties; no cell is there twice."""
    number = tl.program_id(0) * cells + tl.arange(0, cells)
    here = number < count
    slot = tl.load(cells_of + number * 3, mask=here, other=0)
    row = tl.load(cells_of + number * 3 + 1, mask=here, other=0)
    ids = tl.load(cells_of + number * 3 + 2, mask=here, other=0)
    here = here & (ids >= 0) & (ids < width)
    added = tl.load(bias + number, mask=here, other=0.0)
    word = tl.load(bits + slot * bit_columns + (ids >> 5), mask=here, other=0)
    known = here & (((word >> (ids & 31).to(tl.int32)) & 1) != 0)
    x = tl.load(logits + row * logits_stride + ids, mask=here, other=0.0).to(tl.float32)
    x = tl.where(known, tl.load(values + slot * width + ids, mask=known, other=0.0), x)
    tl.store(values + slot * width + ids, x + added, mask=here)
    _set_bit(bits, slot, bit_columns, ids.to(tl.int32), here)


@triton.jit(do_not_specialize=["count"])
def _stop_kernel(cells_of, count, bits, bit_columns, width, cells: tl.constexpr):
    number = tl.program_id(0) * cells + tl.arange(0, cells)
    here = number < count
    slot = tl.load(cells_of + number * 3, mask=here, other=0)
    ids = tl.load(cells_of + number * 3 + 2, mask=here, other=0)
    _set_bit(bits, slot, bit_columns, ids.to(tl.int32), here & (ids >= 0) & (ids < width))


@triton.jit(do_not_specialize=["logits_stride"])
def _left_kernel(
    ints, logits, logits_stride, width, edit_bits, edit_values, stop_bits, left, bit_columns, tile: tl.constexpr
):
    """Mark the stop masks that leave anything."""
    job = tl.program_id(1)
    stop = job_int(ints, job, STOP)
    if stop < 0:
        return
    ids = tl.program_id(0) * tile + tl.arange(0, tile)
    x = read_raw(logits, logits_stride, job_int(ints, job, ROW), ids, width)
    x = edited(x, job_int(ints, job, EDIT), ids, width, edit_bits, edit_values, bit_columns)
    x = tl.where(bits_of(stop_bits, stop, bit_columns, ids, width), float("-inf"), x)
    if tl.max((x > float("-inf")).to(tl.int32), axis=0) > 0:
        tl.store(left + stop, 1)


@dataclass(frozen=True)
class Edits:
    """What `read_tile` reads beside the logits.

    Attributes:
        bits, values: int32 [edited rows, columns], float32 [edited rows, V]; a value has a meaning where its bit is
            set.
        stop_bits, stop_left: int32 [rows under a stop mask, columns]; int32, 0 where the mask leaves nothing.
        masks: int32 [rows under a grammar, words], a bit for each id that is allowed.
    """

    bits: torch.Tensor
    values: torch.Tensor
    stop_bits: torch.Tensor
    stop_left: torch.Tensor
    masks: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of `read_tile`."""
        return (
            self.bits,
            self.values,
            self.stop_bits,
            self.stop_left,
            self.bits.shape[1],
            self.masks,
            self.masks.shape[1],
            False,
        )


#: of `read_tile`, where no job has edits, a stop mask or a grammar
NO_EDITS: tuple[Any, ...] = (None, None, None, None, 0, None, 0, True)


def prepare_edits(
    logits: torch.Tensor, asked: SampleJobs, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> tuple[Any, ...]:
    """Queue the kernels that write the cells of the edits; returns the last arguments of `read_tile`. `sample.py` says
    what the arguments are."""
    if not (asked.edited or asked.stopped or asked.masked):
        return NO_EDITS
    device, width = logits.device, logits.shape[1]
    columns = -(-width // 32)
    edits = Edits(
        torch.zeros((asked.edited, columns), dtype=torch.int32, device=device),
        torch.empty((asked.edited, width), dtype=torch.float32, device=device),
        torch.zeros((asked.stopped, columns), dtype=torch.int32, device=device),
        torch.zeros((asked.stopped,), dtype=torch.int32, device=device),
        sent["masks"] if asked.masked else torch.empty((0, 1), dtype=torch.int32, device=device),
    )
    if tokens is not None and asked.longest:
        _penalise(logits, asked, sent, tokens, edits)
    if "bias" in sent:
        count = sent["bias"].numel()
        _bias_kernel[(triton.cdiv(count, _CELLS),)](
            sent["bias_cells"], sent["bias"], count, logits, logits.stride(0), edits.values, edits.bits, columns, width,
            cells=_CELLS,
        )  # fmt: skip
    if asked.stopped:
        count = len(sent["stop_cells"])
        _stop_kernel[(triton.cdiv(count, _CELLS),)](
            sent["stop_cells"], count, edits.stop_bits, columns, width, cells=_CELLS
        )
        _left_kernel[(triton.cdiv(width, TILE), asked.jobs)](
            sent["ints"], logits, logits.stride(0), width, edits.bits, edits.values, edits.stop_bits, edits.stop_left,
            columns, tile=TILE, num_warps=8,
        )  # fmt: skip
    return edits.arguments()


def _penalise(
    logits: torch.Tensor, asked: SampleJobs, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor, edits: Edits
) -> None:
    rows, numbers = sent["edits"], sent["penalties"]
    columns, width = edits.bits.shape[1], logits.shape[1]
    counts = torch.empty((asked.edited, width), dtype=torch.int32, device=logits.device)
    grid: Any = (len(rows), triton.cdiv(asked.longest, _CELLS))
    known = (tokens, tokens.stride(0), counts)
    _clear_kernel[grid](rows, *known, width, cells=_CELLS)
    _count_kernel[grid](rows, *known, edits.bits, columns, width, cells=_CELLS)
    _penalise_kernel[grid](
        rows, numbers, *known, logits, logits.stride(0), edits.values, width, cells=_CELLS,
        # a product that is added unrounded would differ from a CPU's
        enable_fp_fusion=False,
    )  # fmt: skip
