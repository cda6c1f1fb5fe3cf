"""Samples tokens from logits by torch's own operations: the sampler of CPUs, and what the kernels are held to.

Works row by row, so that a row's tables stay in the caches of a CPU, and a row's results depend on that row alone. A
probability is a whole number, its mass: exp of a float64 log times 2^b, rounded. Sums of masses are exact in any order;
`fdasync.gpu.kernels.sample` does the same arithmetic on a GPU. Top-k and top-p keep the first ids of one order (the
larger logit first, then the lower id); a sort is only made of the few ids that stand at the cut. Reads values back, so
a device would be waited for. Knows nothing of models, sequences or requests. Called by `sampler.py`; pure, no state.

The order is: penalties, bias, stop mask, grammars, temperature, top-k, top-p over what top-k left, min-p.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.sampling.plan import MASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_transformers.sampling.plan import SamplePlan

_NEG_INF = float("-inf")
# a row's masses must add up in an int64, and float64 must hold one
_SUM_BITS, _MOST_BITS = 62, 52
# of the histogram that finds the cut of a top-p, and how many to a unit of log-probability
_BINS, _BINS_EACH = 2048, 48.0


class Job(NamedTuple):
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


class Spread(NamedTuple):
    """A distribution.

    Attributes:
        ids: int64, ascending: those that filters keep; None: all.
        masses: int64, of these ids.
        total, whole: sums of these masses; of all, where a job without filters or raw log-probs need it, else 0.
    """

    ids: torch.Tensor | None
    masses: torch.Tensor
    total: int
    whole: int


def sample_on_host(
    logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """As `compute_samples` of `sampler.py`, which says what arguments and results are; waits for the results."""
    jobs = [
        Job(*ints, *floats) for ints, floats in zip(sent["ints"].tolist(), sent["floats"].tolist(), strict=True)
    ]
    changes = Changes(logits, plan, sent, tokens)
    tops = _asked_tops(plan, sent)
    unit = 2.0 ** min(_MOST_BITS, _SUM_BITS - logits.shape[1].bit_length())
    picks: list[int] = []
    finite: list[bool] = []
    raws: list[float] = []
    logs: list[float] = []
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, job in enumerate(jobs[: plan.count]):
        given = logits[number].float()
        first = float(given.max())
        finite.append(math.isfinite(first))
        x = _ordered(changes.apply(given, job))
        best, pick = x.max(dim=-1)
        top = float(best)
        token = int(pick)
        spread = spread_of(x, top, job, unit) if job.mass else None
        if spread is not None and job.drawn and spread.total:
            token = _draw(spread, job.noise)
        picks.append(token)
        log = _scaled_one(float(x[token]), top, job.scale)
        logs.append(log - _log_mass(spread.total, unit) if spread is not None else 0.0)
        raw_job = jobs[job.raw] if job.raw >= 0 else None
        raw = None
        if raw_job is not None:
            given = _ordered(given)
            raw = spread if raw_job is job else spread_of(given, first, raw_job, unit)
            assert raw is not None
            raws.append(_scaled_one(float(given[token]), first, 1.0) - _log_mass(raw.whole, unit))
        else:
            raws.append(0.0)
        if number in tops:
            count, by_raw = tops[number]
            found.append(
                _alternatives(given, first, None, 1.0, _log_mass(raw.whole, unit), count)
                if by_raw and raw is not None
                else _alternatives(x, top, spread, job.scale, _log_mass(spread.total if spread else 0, unit), count)
            )
    results = {
        "tokens": torch.tensor(picks, dtype=torch.int64),
        "finite": torch.tensor(finite, dtype=torch.bool),
        "raw": torch.tensor(raws, dtype=torch.float32),
        "processed": torch.tensor(logs, dtype=torch.float64),
    }
    if found:
        most = min(plan.most_tops, logits.shape[1])
        results["top_values"] = torch.full((len(found), most), _NEG_INF, dtype=torch.float64)
        results["top_ids"] = torch.zeros((len(found), most), dtype=torch.int64)
        for row, (values, ids) in enumerate(found):
            results["top_values"][row, : len(ids)] = values
            results["top_ids"][row, : len(ids)] = ids
    return {name: values.to(logits.device) for name, values in results.items()}


def _asked_tops(plan: SamplePlan, sent: Mapping[str, torch.Tensor]) -> dict[int, tuple[int, bool]]:
    """How many alternatives of each row that asks, and whether by raw log-probs."""
    if not plan.top_rows:
        return {}
    asked = zip(sent["top_counts"].tolist(), sent["top_raw"].tolist(), strict=True)
    return {row: (count, bool(raw)) for row, (count, raw) in zip(plan.top_rows, asked, strict=True)}


# -- before the softmax -------------------------------------------------------------------------


class Changes:
    """Penalties, bias, stop masks and grammars of a step, applied row by row."""

    def __init__(
        self, logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
    ) -> None:
        self._sent = sent
        self._tokens = tokens
        self._penalised = {edit[0]: (at, *edit[2:]) for at, edit in enumerate(_lists(sent, "edits"))}
        self._biased = _spans(_lists(sent, "bias_cells"))
        self._stopped = _spans(_lists(sent, "stop_cells"))
        self._width = logits.shape[1]

    def apply(self, given: torch.Tensor, job: Job) -> torch.Tensor:
        """Logits of a job, float32; the row itself where nothing changes it."""
        x = given
        if job.edit in self._penalised:
            x = self._penalise(x, *self._penalised[job.edit])
        if job.edit in self._biased:
            part = self._biased[job.edit]
            ids, values = self._inside(self._sent["bias_cells"][part, 2], self._sent["bias"][part])
            x = x.clone() if x is given else x
            x[ids] += values
        if job.stop >= 0:
            cells = self._sent["stop_cells"][self._stopped[job.stop], 2]
            ids, _ = self._inside(cells, cells)
            masked = x.index_fill(0, ids, _NEG_INF)
            # a mask that leaves nothing is passed over
            x = x if masked.max() == _NEG_INF else masked
        if job.mask >= 0:
            words = self._sent[MASKS][job.mask]
            bits = torch.arange(32, dtype=torch.int32, device=words.device)
            # an arithmetic shift: the lowest bit is the token's whatever the sign
            allowed = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten()[: self._width]
            x = x.masked_fill(~allowed, _NEG_INF)
        return x

    def _inside(self, ids: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = ids < self._width
        return ids[here], values[here]

    def _penalise(self, x: torch.Tensor, at: int, lane: int, end: int, prompt_len: int) -> torch.Tensor:
        """Repetition (arXiv 1909.05858; prompt and output), presence and frequency penalties (output)."""
        assert self._tokens is not None
        known = self._tokens[lane, :end].long()
        real = (known >= 0) & (known < self._width)
        repetition, presence, frequency = self._sent["penalties"][at]
        seen = known[real].unique()
        part = x[seen]
        part = torch.where(part > 0, part / repetition, part * repetition)
        output = known[prompt_len:][real[prompt_len:]]
        counts = torch.zeros(self._width, dtype=torch.float32, device=x.device)
        # whole numbers: the order of the additions changes nothing
        counts = counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))[seen]
        part = part - frequency * counts - presence * (counts > 0)
        return x.index_copy(0, seen, part)


def _lists(sent: Mapping[str, torch.Tensor], name: str) -> list[list[int]]:
    return sent[name].tolist() if name in sent else []


def _spans(cells: list[list[int]]) -> dict[int, slice]:
    """Where the cells of each slot stand; those of one slot stand together."""
    spans: dict[int, slice] = {}
    for number, cell in enumerate(cells):
        spans[cell[0]] = slice(spans[cell[0]].start if cell[0] in spans else number, number + 1)
    return spans


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """With -inf for NaN, so that an order exists."""
    return x.masked_fill(x.isnan(), _NEG_INF) if math.isnan(float(x.max())) else x


# -- the distribution and the draw --------------------------------------------------------------


def spread_of(x: torch.Tensor, best: float, job: Job, unit: float) -> Spread:
    """The distribution of a job: x float32 [V], `best` the largest of it."""
    top_k = job.top_k if job.top_k < len(x) else 0
    ids: torch.Tensor | None = None
    if top_k and job.raw < 0:
        ids = first_ids(x, top_k)
        logs = _scaled(x[ids], best, job.scale)
    else:
        logs = _scaled(x, best, job.scale)
    masses = _masses(logs, unit)
    whole = int(masses.sum())
    if top_k and ids is None:
        ids = first_ids(x, top_k)
        logs, masses = logs[ids], masses[ids]
    if job.top_p < 1.0 and whole:
        total = whole if ids is None else int(masses.sum())
        target = max(min(math.ceil(job.top_p * total), total), 1)
        kept = _nucleus(logs, x if ids is None else x[ids], masses, target)
        ids = kept if ids is None else ids[kept]
        logs, masses = logs[kept], masses[kept]
    if job.floor > _NEG_INF:
        kept = (logs >= job.floor).nonzero().squeeze(-1)
        ids = kept if ids is None else ids[kept]
        masses = masses[kept]
    return Spread(ids, masses, whole if ids is None else int(masses.sum()), whole)


def _scaled(x: torch.Tensor, best: float, scale: float) -> torch.Tensor:
    """Logs of probabilities over the largest one; 0 at the largest, also where that is infinite."""
    logs = x.double()
    if math.isinf(best):
        return torch.where(x == best, 0.0 if best > 0 else _NEG_INF, _NEG_INF).double()
    return logs.sub_(best).mul_(scale)


def _scaled_one(x: float, best: float, scale: float) -> float:
    return 0.0 if x == best else (x - best) * scale


def _masses(logs: torch.Tensor, unit: float) -> torch.Tensor:
    return logs.exp().mul_(unit).add_(0.5).long()


def _log_mass(total: int, unit: float) -> float:
    return math.log(float(total) / unit) if total else _NEG_INF


def first_ids(x: torch.Tensor, k: int) -> torch.Tensor:
    """Ids, ascending, of the k largest; exactly k, the lower id first among equals."""
    bound = x.topk(k).values[-1]
    ids = (x >= bound).nonzero().squeeze(-1)
    if len(ids) > k:
        equal = x[ids] == bound
        room = k - int((~equal).sum())
        ids = ids[~equal | (equal.cumsum(0) <= room)]
    return ids


def _nucleus(logs: torch.Tensor, x: torch.Tensor, masses: torch.Tensor, target: int) -> torch.Tensor:
    """Places, ascending, of the ids that are kept: those before which less than `target` stands in the order.

    A histogram over falling probability finds where that is, so only the ids of one of its bins are sorted.
    """
    bins = logs.mul(-_BINS_EACH).clamp_(max=_BINS - 1).long()
    sums = torch.zeros(_BINS, dtype=torch.int64, device=x.device).index_add_(0, bins, masses)
    before = sums.cumsum(0) - sums
    last = int((before < target).sum()) - 1
    at = (bins == last).nonzero().squeeze(-1)
    order = x[at].sort(descending=True, stable=True).indices
    part = masses[at[order]]
    over = part.cumsum(0) - part + before[last] >= target
    keep = bins <= last
    keep[at[order[over]]] = False
    return keep.nonzero().squeeze(-1)


def _draw(spread: Spread, noise: float) -> int:
    """Inverse CDF over ascending ids, by whole numbers: never an id of probability 0."""
    left = min(int(noise * float(spread.total)), spread.total - 1)
    place = int(torch.searchsorted(spread.masses.cumsum(0), left, right=True))
    return place if spread.ids is None else int(spread.ids[place])


# -- log-probs ----------------------------------------------------------------------------------


def _alternatives(
    x: torch.Tensor, best: float, spread: Spread | None, scale: float, log_mass: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, float64, and ids of the best that have a probability, unordered."""
    ids = None if spread is None else spread.ids
    table = x if ids is None else x[ids]
    first = first_ids(table, min(count, len(table))) if len(table) else torch.zeros(0, dtype=torch.int64)
    values = table[first]
    logs = torch.where(values == _NEG_INF, _NEG_INF, _scaled(values, best, scale) - log_mass)
    return logs, first if ids is None else ids[first]


def best_of(table: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids, both [n, k], of the k largest of each row, exactly those of lower ids among equals; unordered. k
    is at most the width. Waits for nothing."""
    bound = table.topk(k, dim=-1).values[:, -1:]
    above, equal = table > bound, table == bound
    room = k - above.sum(dim=-1, keepdim=True)
    # by value of the k-th largest, since topk's order of equals may change with the batch
    keep = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    values, ids = table.masked_fill(~keep, _NEG_INF).topk(k, dim=-1)
    return values, ids
