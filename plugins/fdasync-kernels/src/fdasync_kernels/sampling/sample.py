"""Kernels that sample a token for each row of logits, without a sort and without a table of the vocabulary's size.

A step is a handful of launches, each over all jobs (`SampleJobs`): the largest logits of chunks; where a job has top-k
or top-p, two logits that bound its cut (`narrow.py`); exact masses of tiles, and marks of the ids between the bounds;
the cut (`search.py`); then one program a row that finds the tile of its noise, and the id in it. `tile.py` says what a
mass is, and `edits.py` how penalties, bias and stop masks come in. Nothing here waits for the device, and a row's
results depend on that row alone: what its programs add up in any order are whole numbers. Knows no requests, only
numbers. Called by the plugins' samplers; runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from fdasync.errors import BadInput
from fdasync_kernels.registry import operation
from fdasync_kernels.sampling.edits import NO_EDITS, prepare_edits
from fdasync_kernels.sampling.log_masses import logs_of_masses
from fdasync_kernels.sampling.mass import shift_of
from fdasync_kernels.sampling.narrow import PIVOTS, bounds_kernel, narrow_kernel
from fdasync_kernels.sampling.passes import chunk_kernel, draw_kernel, masses_kernel, peaks_kernel
from fdasync_kernels.sampling.search import cut_kernel, slow_cut_kernel
from fdasync_kernels.sampling.tile import CHUNK, FLOATS, INTS, TILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_kernels.sampling.edits import SampleJobs


# ids between the bounds of a cut that are listed; a row with more takes the slow way
_LISTED = 8192
# how many ids may stand between the bounds of a top-p before there is another pass
_CLOSE = (2048, _LISTED, _LISTED)
# ids of a list that are read at a time, and of a tile whose masses are
_BLOCK, _MASSES_BLOCK = 2048, 512
# the bits of a float32 logit that are 0
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
# ids of a program that narrows
_SPAN = 2048
_WARPS = {"peaks": 2, "narrow": 1, "bounds": 4, "masses": 1, "cut": 8, "draw": 4}


class Sampled(NamedTuple):
    """Results of `sample_rows`: new tensors on the device, the caller's.

    Attributes:
        tokens: int64 [N], within the vocabulary whatever the logits are.
        finite: bool [N], False for rows that have NaN or +inf, or nothing finite.
        raw, processed: float32 and float64 [N], log-probs of the tokens; no meaning for rows that did not ask.
        top_values, top_ids: float64 and int64 [A, most_tops at most], the alternatives of the rows that ask, best
            first, the lower id first among equals; -inf behind a row's last. None: no row asks.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    raw: torch.Tensor
    processed: torch.Tensor
    top_values: torch.Tensor | None
    top_ids: torch.Tensor | None


@operation
def sample_rows(
    logits: torch.Tensor, asked: SampleJobs, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> Sampled:
    """Sample one token for each row; queues work on the current stream and returns.

    A job is one distribution over the vocabulary. Jobs 0 to N - 1 belong to the rows; further jobs take logits as given
    where a row's job changes them, for raw log-probs. A probability is exp of a float64 log, rounded to 2^-b of the
    largest one of its row, where b = 62 - the bits of V, 52 at most (44 for 152k ids).

    Args:
        logits: [N, V] bfloat16, float16 or float32; rows of any stride. Read only.
        asked: numbers that the host knows: rows, jobs; known tokens of the longest penalised row; rows with edits,
            under a stop mask, under a grammar; whether a job wants its sum, whether one has top-p and no top-k; the
            largest top-k; the most alternatives.
        sent: tensors on the device of the logits; read only. `ints` int64 [jobs, 8] and `floats` float64 [jobs, 4]:
            see `tile.py`; `edits` int64 [P, 5] (slot, row, lane, known tokens, tokens of the prompt) and
            `penalties` float32 [P, 3] (repetition, presence, frequency); `bias_cells` and `stop_cells` int64 [n, 3]
            (slot, row, id) and `bias` float32 [n]; `masks` int32 [rows under a grammar, words]; `top_jobs`,
            `top_counts` and `top_raw` int64 [A].
        tokens: int [lanes, max_tokens], the known tokens; read where `asked.longest`.

    Raises:
        BadInput: another shape or dtype.
    """
    _check(logits, asked, sent)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    work = _Work(logits, asked, sent, tokens)
    work.find_peaks()
    if asked.masses:
        work.add_masses()
    return work.draw()


class _Work:
    """The tensors of one call."""

    def __init__(
        self, logits: torch.Tensor, asked: SampleJobs, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
    ) -> None:
        self._logits, self._asked, self._sent = logits, asked, sent
        width = logits.shape[1]
        self._shift = shift_of(width)
        self._tiles = triton.cdiv(width, TILE)
        self._sizes: dict[str, Any] = {"tiles": self._tiles, "padded": triton.next_power_of_2(self._tiles)}
        self._edits = prepare_edits(logits, asked, sent, tokens)
        self._read = (logits, logits.stride(0), width)
        self._chunk_best = self._new(torch.int64, self._tiles * (TILE // CHUNK))
        self._tile_best = self._new(torch.float32, self._tiles)
        self._given = self._new(torch.float32, self._tiles)
        self._total, self._kept, self._above = (self._new(torch.int64, self._tiles) for _ in range(3))
        self._cuts = self._new(torch.int64, 1)
        self._filtered = asked.nuclei or asked.most > 0

    def _new(self, dtype: torch.dtype, columns: int) -> torch.Tensor:
        return torch.empty((self._asked.jobs, columns), dtype=dtype, device=self._logits.device)

    def find_peaks(self) -> None:
        peaks_kernel[(self._tiles, self._asked.jobs)](
            *self._read, self._sent["ints"], self._chunk_best, self._tile_best, self._given, *self._edits,
            tiles=self._tiles, chunks=TILE // CHUNK, chunk=CHUNK, num_warps=_WARPS["peaks"],
        )  # fmt: skip

    def add_masses(self) -> None:
        sent, jobs = self._sent, self._asked.jobs
        numbers = (sent["ints"], sent["floats"], self._tile_best)
        # written and read only where something is filtered
        bounds = marks = self._cuts
        if self._filtered:
            bounds = self._bounds(numbers)
            marks = self._new(torch.uint8, self._tiles * TILE // 8)
        masses_kernel[(self._tiles, jobs)](
            *self._read, self._shift, *numbers, bounds, self._total, self._above, self._kept, marks, *self._edits,
            filtered=self._filtered, tile=TILE, block=_MASSES_BLOCK, **self._sizes, num_warps=_WARPS["masses"],
        )  # fmt: skip
        if self._filtered:
            slow = torch.zeros((jobs,), dtype=torch.int32, device=self._logits.device)
            listed, masses = (self._new(torch.int64, _LISTED) for _ in range(2))
            spare = _SPARE_BITS[self._logits.dtype] if self._edits is NO_EDITS else 0
            cut_kernel[(jobs,)](
                *self._read, spare, self._shift, *numbers, marks.view(torch.int32), listed, masses,
                self._total, self._above, self._kept, self._cuts, slow, *self._edits,
                most=_LISTED, tile=TILE, block=_BLOCK, **self._sizes, num_warps=_WARPS["cut"],
            )  # fmt: skip
            slow_cut_kernel[(jobs,)](
                *self._read, self._shift, *numbers, self._kept, self._cuts, slow, *self._edits,
                tile=TILE, **self._sizes, num_warps=16,
            )  # fmt: skip

    def _bounds(self, numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """float32 [jobs, 2], between which the cuts stand."""
        jobs, width = self._asked.jobs, self._read[2]
        ints, floats, tile_best = numbers
        spans = triton.cdiv(width, _SPAN)
        bounds, close = self._new(torch.float32, 2), self._new(torch.int32, 1)
        sums = self._new(torch.float32, spans * PIVOTS)
        for number, few in enumerate(_CLOSE if self._asked.nuclei else _CLOSE[:1]):
            if self._asked.nuclei:
                narrow_kernel[(spans, jobs)](
                    *self._read, *numbers, bounds, close, sums, *self._edits,
                    spans=spans, first=number == 0, span=_SPAN, **self._sizes, num_warps=_WARPS["narrow"],
                )  # fmt: skip
            bounds_kernel[(jobs,)](
                width, ints, floats, self._chunk_best, tile_best, bounds, close, sums,
                **self._sizes, chunks=TILE // CHUNK, spans=spans, padded_spans=triton.next_power_of_2(spans),
                first=number == 0, few=few, num_warps=_WARPS["bounds"],
            )  # fmt: skip
        return bounds

    def draw(self) -> Sampled:
        count, device = self._asked.count, self._logits.device
        tokens = torch.empty((count,), dtype=torch.int64, device=device)
        finite = torch.empty((count,), dtype=torch.bool, device=device)
        raw = torch.zeros((count,), dtype=torch.float32, device=device)
        processed = torch.zeros((count,), dtype=torch.float64, device=device)
        draw_kernel[(count,)](
            *self._read, self._shift, self._sent["ints"], self._sent["floats"], self._tile_best, self._given,
            self._total, self._kept, self._cuts, tokens, finite, raw, processed, *self._edits,
            filtered=self._filtered, chunks=TILE // CHUNK, chunk=CHUNK, **self._sizes, num_warps=_WARPS["draw"],
            enable_fp_fusion=False,
        )  # fmt: skip
        values = ids = None
        if "top_jobs" in self._sent:
            values, ids = self._alternatives()
        return Sampled(tokens, finite, raw, processed, values, ids)

    def _alternatives(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest ids stand in the k chunks with the largest of all."""
        sent, jobs = self._sent, self._sent["top_jobs"]
        most = min(self._asked.most_tops, self._read[2])
        best = self._chunk_best.index_select(0, jobs)
        picked = best.topk(min(most, best.shape[1]), dim=-1).values
        orders = torch.empty((len(jobs), picked.shape[1] * CHUNK), dtype=torch.int64, device=jobs.device)
        chunk_kernel[tuple(picked.shape)](
            *self._read, sent["ints"], jobs, picked, orders, *self._edits, picked.shape[1], chunk=CHUNK
        )
        orders = orders.topk(most, dim=-1).values
        values, ids = _decoded(orders)
        first = self._tile_best.index_select(0, jobs).amax(dim=-1, keepdim=True)
        raw = sent["top_raw"].unsqueeze(-1) > 0
        floats = sent["floats"].index_select(0, jobs)
        kept = torch.where(raw, self._total.index_select(0, jobs), self._kept.index_select(0, jobs))
        # by the logarithm of the draw: a library's may differ in the last bit
        whole = logs_of_masses(kept, self._shift).unsqueeze(-1)
        logs = torch.where(values == first, 0.0, values.double() - first.double()) * floats[:, :1]
        real = torch.arange(most, device=jobs.device) < sent["top_counts"].unsqueeze(-1)
        passed = logs >= floats[:, 3:4]
        if self._filtered:
            cut = self._cuts.index_select(0, jobs)
            limited = (sent["ints"].index_select(0, jobs)[:, 6:7] > 0) | (floats[:, 2:3] < 1.0)
            passed &= (orders >= cut) | ~limited
        real &= (passed | raw) & (values > float("-inf"))
        return torch.where(real, logs - whole, float("-inf")), ids


def _decoded(orders: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, float32, and ids, int64, of orders."""
    keys = (orders >> 32).int()
    values = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    return values, 0x7FFFFFFF - (orders & 0xFFFFFFFF)


def _check(logits: torch.Tensor, asked: SampleJobs, sent: Mapping[str, torch.Tensor]) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    if logits.dim() != 2 or logits.dtype not in floats or logits.shape[0] != asked.count or not logits.numel():
        raise BadInput("logits", f"{logits.dtype} {tuple(logits.shape)} for {asked.count} rows")
    if logits.shape[1] >= 1 << 31:
        raise BadInput("logits", f"{logits.shape[1]} ids", limit=(1 << 31) - 1)
    for name, columns, dtype in (("ints", INTS, torch.int64), ("floats", FLOATS, torch.float64)):
        table = sent[name]
        if tuple(table.shape) != (asked.jobs, columns) or table.dtype is not dtype or not table.is_contiguous():
            raise BadInput(name, f"{table.dtype} {tuple(table.shape)} where {dtype} {(asked.jobs, columns)} is due")
