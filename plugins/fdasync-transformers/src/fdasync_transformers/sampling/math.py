"""Samples a step on the host, row by row: the sampler of CPUs, and what the kernels are held to.

Applies penalties, bias, stop masks and grammars to a row, and asks `host_rows.py` for its distribution. A row's results
depend on that row alone. Reads the logits on the host, so a device would be waited for. Knows nothing of models,
sequences or requests. Called by `sampler.py`; pure, no state.

The order is: penalties, bias, stop mask, grammars, temperature, top-k, top-p over what top-k left, min-p.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fdasync_transformers.sampling import host_rows
from fdasync_transformers.sampling.host_rows import Filters, Spread, spread_of
from fdasync_transformers.sampling.plan import MASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from fdasync_transformers.sampling.host_rows import Logs, Row, Whole
    from fdasync_transformers.sampling.plan import SamplePlan

_NEG_INF = float("-inf")


class _Job(NamedTuple):
    """The numbers of one distribution: a row of `plan.arrays["ints"]` and `["floats"]`."""

    row: int
    edit: int
    stop: int
    mask: int
    mass: int
    drawn: int
    top_k: int
    raw: int
    scale: float
    noise: float
    top_p: float
    floor: float

    @property
    def filters(self) -> Filters:
        return Filters(self.scale, self.top_k, self.top_p, self.floor)


class _Scored(NamedTuple):
    """A sampled row: its token, whether its logits are sound, log-probs, and values and ids of alternatives."""

    token: int
    finite: bool
    raw: float
    processed: float
    top: tuple[Logs, Whole] | None


def sample_on_host(
    logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """As `compute_samples` of `sampler.py`, which says what arguments and results are; waits for the device."""
    arrays = {name: values.cpu().numpy() for name, values in sent.items()}
    known = None if tokens is None else tokens.cpu().numpy()
    changes = _Changes(arrays, known, logits.shape[1])
    jobs = [
        _Job(*ints, *floats) for ints, floats in zip(*(arrays[n].tolist() for n in ("ints", "floats")), strict=True)
    ]
    tops: dict[int, tuple[int, bool]] = {}
    if plan.top_rows:
        asked = zip(arrays["top_counts"].tolist(), arrays["top_raw"].tolist(), strict=True)
        tops = {row: (count, bool(raw)) for row, (count, raw) in zip(plan.top_rows, asked, strict=True)}
    rows = [
        _score(numbers_of(row), job, jobs, changes, tops.get(job.row))
        for row, job in zip(logits, jobs[: plan.count], strict=True)
    ]
    made = {
        "tokens": np.array([row.token for row in rows], np.int64),
        "finite": np.array([row.finite for row in rows], np.bool_),
        "raw": np.array([row.raw for row in rows], np.float32),
        "processed": np.array([row.processed for row in rows], np.float64),
    }
    if tops:
        made.update(_side_by_side([row.top for row in rows if row.top is not None], plan.most_tops, logits.shape[1]))
    return {name: torch.from_numpy(values).to(logits.device) for name, values in made.items()}


def numbers_of(row: torch.Tensor) -> Row:
    """A row as float32; its memory where it is that."""
    row = row.detach().cpu()
    if row.dtype is torch.bfloat16:
        # torch would ask its other threads to help
        halves = row.view(torch.int16).numpy().view(np.uint16)
        return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
    return row.numpy().astype(np.float32, copy=False)


def _score(given: Row, job: _Job, jobs: Sequence[_Job], changes: _Changes, top: tuple[int, bool] | None) -> _Scored:
    finite = math.isfinite(given.max())
    given = host_rows.ordered(given)
    x = host_rows.ordered(changes.apply(given, job))
    spread = spread_of(x, job.filters, whole=job.raw == job.row) if job.mass else None
    pick = int(x.argmax())
    best = float(x[pick])
    token = host_rows.draw(spread, job.noise) if spread is not None and job.drawn and spread.total else pick
    processed = raw = log_mass = 0.0
    if spread is not None:
        log_mass = host_rows.log_mass(spread.total, len(x))
        processed = host_rows.log_of(float(x[token]), best, job.scale) - log_mass
    found = None
    if job.raw >= 0:
        first = float(given.max())
        own = spread if job.raw == job.row else spread_of(given, jobs[job.raw].filters, whole=True)
        assert own is not None
        whole = host_rows.log_mass(own.whole, len(x))
        raw = host_rows.log_of(float(given[token]), first, 1.0) - whole
        if top is not None and top[1]:
            found = _alternatives(given, None, Filters(), whole, top[0])
    if top is not None and not top[1]:
        found = _alternatives(x, spread, job.filters, log_mass, top[0])
    return _Scored(token, finite, raw, processed, found)


def _alternatives(x: Row, spread: Spread | None, filters: Filters, log_mass: float, count: int) -> tuple[Logs, Whole]:
    """Log-probs and ids of the best that filters keep, unordered; -inf where there is no probability."""
    ids = None if spread is None else spread.ids
    table = x if ids is None else x[ids]
    if not len(table):
        return np.zeros(0), np.zeros(0, np.int64)
    first = host_rows.first_ids(table, min(count, len(table)))
    values = table[first]
    logs = host_rows.scaled(values, float(x.max()), filters.scale)
    # not before: the sum of no masses is -inf too
    logs[values > _NEG_INF] -= log_mass
    return logs, first if ids is None else ids[first]


def _side_by_side(tops: Sequence[tuple[Logs, Whole]], most: int, width: int) -> dict[str, NDArray[Any]]:
    most = min(most, width)
    values, table = np.full((len(tops), most), _NEG_INF), np.zeros((len(tops), most), np.int64)
    for row, (logs, ids) in enumerate(tops):
        values[row, : len(ids)], table[row, : len(ids)] = logs, ids
    return {"top_values": values, "top_ids": table}


class _Changes:
    """Penalties, bias, stop masks and grammars of a step, applied row by row."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], tokens: NDArray[Any] | None, width: int) -> None:
        self._arrays = arrays
        self._tokens = tokens
        self._width = width
        nothing = np.zeros((0, 5), np.int64)
        self._penalised = {edit[0]: number for number, edit in enumerate(arrays.get("edits", nothing).tolist())}
        self._biased = _spans(arrays.get("bias_cells", nothing))
        self._stopped = _spans(arrays.get("stop_cells", nothing))

    def apply(self, given: Row, job: _Job) -> Row:
        """Logits of a job; the row itself where nothing changes it."""
        x = given
        if job.edit in self._penalised:
            x = self._penalise(x, self._penalised[job.edit])
        if job.edit in self._biased:
            part = self._biased[job.edit]
            ids, values = self._arrays["bias_cells"][part, 2], self._arrays["bias"][part]
            x = x.copy() if x is given else x
            x[ids[ids < self._width]] += values[ids < self._width]
        if job.stop in self._stopped:
            ids = self._arrays["stop_cells"][self._stopped[job.stop], 2]
            masked = x.copy()
            masked[ids[ids < self._width]] = _NEG_INF
            # a mask that leaves nothing is passed over
            x = x if masked.max() == _NEG_INF else masked
        if job.mask >= 0:
            bits = np.unpackbits(self._arrays[MASKS][job.mask].view(np.uint8), bitorder="little")[: self._width]
            x = np.where(bits, x, np.float32(_NEG_INF))
        return x

    def _penalise(self, x: Row, number: int) -> Row:
        """Repetition (arXiv 1909.05858; prompt and output), presence and frequency penalties (output)."""
        assert self._tokens is not None
        _, _, lane, end, prompt_len = self._arrays["edits"][number].tolist()
        repetition, presence, frequency = self._arrays["penalties"][number]
        known = self._tokens[lane, :end]
        output = known[prompt_len:]
        seen = np.unique(known[(known >= 0) & (known < self._width)])
        output = output[(output >= 0) & (output < self._width)]
        counts = np.bincount(np.searchsorted(seen, output), minlength=len(seen)).astype(np.float32)
        part = x[seen]
        with np.errstate(over="ignore"):
            part = np.where(part > 0, part / repetition, part * repetition)
        x = x.copy()
        x[seen] = part - frequency * counts - presence * (counts > 0)
        return x


def _spans(cells: NDArray[Any]) -> dict[int, slice]:
    """Where the cells of each slot stand; the cells of one slot stand together."""
    slots, starts, counts = np.unique(cells[:, 0], return_index=True, return_counts=True)
    found = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
    return {slot: slice(start, start + count) for slot, start, count in found}


def best_of(table: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids, both [n, k], of the k largest of each row, of equals exactly the lower ids; unordered. k is at
    most the width. Waits for nothing."""
    # by value of the k-th largest, since topk's order of equals may change with the batch
    bound = table.topk(k, dim=-1).values[:, -1:]
    above, equal = table > bound, table == bound
    room = k - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    values, ids = table.masked_fill(~keep, _NEG_INF).topk(k, dim=-1)
    return values, ids
