"""One row of logits on the host: its order, its distribution, the draw and the best ids; numpy only.

A probability is a whole number, its *mass*: exp of a float64 log times 2^b, rounded. Sums of masses are exact in any
order; the kernels of `fdasync_kernels.sampling` do the same arithmetic. Top-k and top-p keep the first ids of one
order (the larger logit first, then the lower id), and only the few ids that may stand at a cut are sorted. No table is
larger than a row, which a CPU's caches hold. Knows no requests and no steps. Called by `math.py`; pure, no state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from fdasync_kernels.sampling.mass import unit_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = NDArray[np.float32]
    Logs = NDArray[np.float64]
    Whole = NDArray[np.int64]

# of the histogram that finds the cut of a top-p, and how many to a unit of log-probability
_BINS, _BINS_EACH = 2048, 48.0
# ids of a chunk, whose largest logits bound a top-k
_CHUNK = 128


class Filters(NamedTuple):
    """Attributes:
    scale: what the distance to the largest logit is multiplied by.
    top_k, top_p: 0 and 1.0: none.
    floor: the log of min-p; -inf: none.
    """

    scale: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    floor: float = -math.inf


class Spread(NamedTuple):
    """A distribution.

    Attributes:
        ids: ascending, the ids that filters keep; None: all.
        masses: of these ids.
        total: the sum of these masses.
        whole: the sum before filters; 0 where top-k kept it from being made.
    """

    ids: Whole | None
    masses: Whole
    total: int
    whole: int


def ordered(x: Row) -> Row:
    """The row with -inf for NaN, so that an order exists; the row itself where it has no NaN."""
    return np.where(np.isnan(x), np.float32(-math.inf), x) if math.isnan(x.max()) else x


def spread_of(x: Row, filters: Filters, *, whole: bool) -> Spread:
    """The distribution of a row without NaN.

    Args:
        whole: make `Spread.whole` in any case.
    """
    best = float(x.max())
    unit = unit_of(len(x))
    top_k = filters.top_k if filters.top_k < len(x) else 0
    ids = first_ids(x, top_k) if top_k else None
    if ids is None or whole:
        logs = scaled(x, best, filters.scale)
        masses = _masses(logs, unit)
        everything = int(masses.sum())
        if ids is not None:
            logs, masses = logs[ids], masses[ids]
    else:
        everything = 0
        logs = scaled(x[ids], best, filters.scale)
        masses = _masses(logs, unit)
    total = everything if ids is None else int(masses.sum())
    if filters.top_p < 1.0 and total:
        # an id is kept while the masses before it are less: at least the first one is
        target = max(min(math.ceil(filters.top_p * float(total)), total), 1)
        kept = _nucleus(logs, x if ids is None else x[ids], masses, target)
        ids = kept if ids is None else ids[kept]
        logs, masses = logs[kept], masses[kept]
    if filters.floor > -math.inf:
        kept = np.flatnonzero(logs >= filters.floor)
        ids = kept if ids is None else ids[kept]
        masses = masses[kept]
    return Spread(ids, masses, everything if ids is None else int(masses.sum()), everything)


def scaled(x: Row, best: float, scale: float) -> Logs:
    """Logs of probabilities over the largest one; 0 at the largest, also where that is infinite."""
    if math.isinf(best):
        return np.where(x == best, 0.0 if best > 0 else -math.inf, -math.inf)
    logs: Logs = np.subtract(x, best, dtype=np.float64)
    logs *= scale
    return logs


def log_of(x: float, best: float, scale: float) -> float:
    """`scaled` of one logit."""
    return 0.0 if x == best else (x - best) * scale


def log_mass(total: int, width: int) -> float:
    """The log of a sum of masses over the mass of the largest logit."""
    return math.log(float(total) / unit_of(width)) if total else -math.inf


def log_mass_of_row(x: Row, scale: float, *, entropy: bool) -> tuple[float, float, float]:
    """The largest logit of a row; the log of its whole distribution's mass over that of the largest; the entropy in
    nats, 0 where it is not asked for. The latter two are NaN where a logit is NaN or +inf, or none is finite."""
    best = float(x.max())
    if not math.isfinite(best):
        return best, math.nan, math.nan
    spread = spread_of(x, Filters(scale), whole=True)
    log = log_mass(spread.whole, len(x))
    if not entropy:
        return best, log, 0.0
    held = np.flatnonzero(spread.masses)
    moment = float((spread.masses[held] * scaled(x[held], best, scale)).sum())
    return best, log, log - moment / float(spread.whole)


def _masses(logs: Logs, unit: float) -> Whole:
    # numpy, as all here: torch would wait for its other threads, which takes longer than the row
    numbers = np.exp(logs)
    numbers *= unit
    numbers += 0.5
    whole: Whole = numbers.astype(np.int64)
    return whole


def first_ids(x: Row, k: int) -> Whole:
    """Ids, ascending, of the k largest; exactly k, the lower id first among equals."""
    few = _at_or_above(x, k)
    values = x[few]
    bound = np.partition(values, len(values) - k)[len(values) - k]
    room = k - int(np.count_nonzero(values > bound))
    equal = values == bound
    found: Whole = few[(values > bound) | (equal & (equal.cumsum() <= room))]
    return found


def _at_or_above(x: Row, k: int) -> Whole:
    """Ids, ascending, that include the k largest: all that reach the k-th largest maximum of a chunk."""
    chunks = len(x) // _CHUNK
    if k > chunks:
        return np.arange(len(x))
    best = x[: chunks * _CHUNK].reshape(-1, _CHUNK).max(axis=1)
    return np.flatnonzero(x >= np.partition(best, chunks - k)[chunks - k])


def _nucleus(logs: Logs, x: Row, masses: Whole, target: int) -> Whole:
    """Places, ascending, of the ids that have less than `target` of mass before them in the order.

    A histogram over falling probability finds the bin of the cut, so only the ids of that bin are sorted.
    """
    numbers = logs * -_BINS_EACH
    bins = np.minimum(numbers, _BINS - 1, out=numbers).astype(np.int64)
    sums = np.zeros(_BINS, np.int64)
    np.add.at(sums, bins, masses)
    before = sums.cumsum() - sums
    last = int(np.count_nonzero(before < target)) - 1
    at = np.flatnonzero(bins == last)
    at = at[np.argsort(-x[at], kind="stable")]
    part = masses[at]
    keep = bins <= last
    keep[at[part.cumsum() - part + before[last] >= target]] = False
    return np.flatnonzero(keep)


def draw(spread: Spread, noise: float) -> int:
    """Inverse CDF over ascending ids, by whole numbers: never an id of mass 0. The total is not 0."""
    left = min(int(noise * float(spread.total)), spread.total - 1)
    place = int(np.searchsorted(spread.masses.cumsum(), left, side="right"))
    return place if spread.ids is None else int(spread.ids[place])
