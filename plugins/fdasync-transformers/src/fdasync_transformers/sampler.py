"""From logits to tokens and log-probs, for a whole step at once.

Every row is sampled on its own: the result for a row depends on its logits, its `SamplerSpec`, its position
and (for penalties) its history, never on the rows beside it. Noise is a function of (seed, sample index,
position) alone, so recomputing a position gives the same token. Knows nothing of models, sequences or
steps. Called by the runner, once per step; pure, no state.

The order is: mask stop ids, penalties, temperature, top-k, top-p over what top-k left, min-p. That is the
order of transformers' own logits processors.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.runner.base import TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.request import SamplerSpec

_NEG_INF = float("-inf")
_NOISE_KEY = Layout("<QQQ")


class SampleOutput(msgspec.Struct, frozen=True):
    """What `sample` returns; one entry per row, in the order given.

    Attributes:
        tokens: sampled ids.
        raw, processed: log-prob of each sampled token; None when no row asked. 0.0 for rows that did not.
        top: alternatives, best first, ties by lower id; None when no row asked, or for rows that did not.
            Fewer than asked where fewer have a probability above 0.
    """

    tokens: list[int]
    raw: list[float] | None = None
    processed: list[float] | None = None
    top: list[TopLogprobs | None] | None = None


def sample(
    logits: torch.Tensor,
    specs: Sequence[SamplerSpec],
    positions: Sequence[int],
    histories: Sequence[np.ndarray[Any, Any]],
) -> SampleOutput:
    """Sample one token per row.

    Args:
        logits: float [N, V], any device; read only.
        specs: N of them.
        positions: absolute position of each token that is being sampled; `positions[i] - prompt_len` tokens
            of the row were sampled before it.
        histories: int [n_i], all known tokens of each row, prompt first; read only where a penalty is in
            force. Ids outside the vocabulary are passed over.

    Log-probs, natural logarithm: `raw` is the float32 log-softmax of the logits as given. `processed` is the
    log-softmax, in float64, of the very distribution that was sampled from. A greedy row has no such
    distribution (its token has probability 1); `processed` then is the log-softmax of the logits after stop
    mask and penalties, at temperature 1 and without filters, which is what a trainer that recomputes
    log-probs of a greedy rollout compares with.

    A greedy row takes the largest logit after stop mask and penalties, the lowest id where several are
    equal; top-k, top-p and min-p cannot change that and are passed over. If a stop mask would leave no token
    at all, the row is not masked.

    Raises:
        RunnerError: a row has NaN or +inf among its logits, or no finite one.
        InvariantBroken: lengths disagree.
    """
    count = len(specs)
    if logits.ndim != 2 or not (logits.shape[0] == count == len(positions) == len(histories)):
        lengths = f"{count} specs, {len(positions)} positions, {len(histories)} histories"
        raise InvariantBroken(f"sample: logits {tuple(logits.shape)}, {lengths}")
    if count == 0:
        return SampleOutput([])
    if all(map(_is_plain, specs, positions)):
        best, tokens = logits.max(dim=-1)
        _check_finite(best)
        return SampleOutput(tokens.tolist())
    return _sample(logits.float(), specs, positions, histories)


def uniform(seed: int, index: int, position: int) -> float:
    """The noise of one token: in [0, 1), 53 bits of BLAKE2b over the three numbers."""
    digest = blake2b(_NOISE_KEY.pack(seed, index, position), digest_size=8, person=b"fdasync noise").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _sample(
    logits: torch.Tensor,
    specs: Sequence[SamplerSpec],
    positions: Sequence[int],
    histories: Sequence[np.ndarray[Any, Any]],
) -> SampleOutput:
    device = logits.device
    rows = range(len(specs))
    _check_finite(logits.amax(dim=-1))
    adjusted = _penalise(logits, specs, histories)
    adjusted = _mask_stops(adjusted, specs, positions)
    tokens = adjusted.argmax(dim=-1)

    # log-probs of the distribution sampled from, float64 [number of random rows, V]
    random = [row for row in rows if specs[row].temperature > 0.0]
    drawn_from = _distribution(_take(adjusted, random), [specs[row] for row in random]) if random else None
    if drawn_from is not None:
        noise = [uniform(specs[row].seed, specs[row].index, positions[row]) for row in random]
        picks = _draw(drawn_from, torch.tensor(noise, dtype=torch.float64, device=device))
        tokens[torch.tensor(random, device=device)] = picks

    raw: list[float] | None = None
    processed: list[float] | None = None
    top: list[TopLogprobs | None] | None = None
    if any(spec.raw for spec in specs):
        raw, top = [0.0] * len(specs), [None] * len(specs)
        asked = [row for row in rows if specs[row].raw]
        table = torch.log_softmax(_take(logits, asked), dim=-1)
        _report(table, tokens, asked, raw, top, [specs[row].top for row in asked])
    if any(spec.processed for spec in specs):
        processed, top = [0.0] * len(specs), top or [None] * len(specs)
        asked = [row for row in rows if specs[row].processed and specs[row].temperature == 0.0]
        if asked:
            table = torch.log_softmax(_take(adjusted, asked).double(), dim=-1)
            _report(table, tokens, asked, processed, top, [0 if specs[r].raw else specs[r].top for r in asked])
        if drawn_from is not None:
            where = [i for i, row in enumerate(random) if specs[row].processed]
            if where:
                asked = [random[i] for i in where]
                ks = [0 if specs[row].raw else specs[row].top for row in asked]
                _report(_take(drawn_from, where), tokens, asked, processed, top, ks)
    if top is not None and all(entry is None for entry in top):
        top = None
    return SampleOutput(tokens.tolist(), raw, processed, top)


def _is_plain(spec: SamplerSpec, position: int) -> bool:
    return (
        spec.temperature == 0.0
        and not (spec.raw or spec.processed)
        and not _has_penalty(spec)
        and not (spec.stop_ids and position - spec.prompt_len < spec.min_tokens)
    )


def _has_penalty(spec: SamplerSpec) -> bool:
    return spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0


def _take(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rows, which ascend; the tensor itself where that is all of them."""
    return table if len(rows) == table.shape[0] else table[torch.tensor(rows, device=table.device)]


def _check_finite(best: torch.Tensor) -> None:
    """`best` is the largest logit of each row: NaN wins a maximum, so one look at it tells all."""
    finite = torch.isfinite(best)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise RunnerError(f"row {row} of the logits has NaN or +inf, or nothing finite (largest: {float(best[row])})")


# -- before the softmax -------------------------------------------------------------------------


def _cells(tokens: Sequence[np.ndarray[Any, Any]], width: int, device: torch.device) -> torch.Tensor:
    """Flat indices into [len(tokens), width] of the tokens of each row that are in range; repeats are kept."""
    flat = [
        (ids := np.asarray(row, dtype=np.int64).ravel())[(ids >= 0) & (ids < width)] + i * width
        for i, row in enumerate(tokens)
    ]
    return torch.from_numpy(np.concatenate(flat)).to(device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def _penalise(
    logits: torch.Tensor, specs: Sequence[SamplerSpec], histories: Sequence[np.ndarray[Any, Any]]
) -> torch.Tensor:
    """Repetition (arXiv 1909.05858; prompt and output), presence and frequency penalties (output)."""
    rows = [row for row, spec in enumerate(specs) if _has_penalty(spec)]
    if not rows:
        return logits
    part, width = _take(logits, rows), logits.shape[-1]
    own = [specs[row] for row in rows]
    if any(spec.repetition_penalty != 1.0 for spec in own):
        seen = torch.zeros_like(part, dtype=torch.bool)
        seen.view(-1)[_cells([histories[row] for row in rows], width, part.device)] = True
        factor = _column([spec.repetition_penalty for spec in own], part)
        part = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    if any(spec.presence_penalty or spec.frequency_penalty for spec in own):
        outputs = [histories[row][specs[row].prompt_len :] for row in rows]
        cells = _cells(outputs, width, part.device)
        counts = torch.zeros_like(part)
        counts.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=part.dtype))
        presence = _column([spec.presence_penalty for spec in own], part)
        frequency = _column([spec.frequency_penalty for spec in own], part)
        part = part - frequency * counts - presence * (counts > 0)
    return _put(logits, rows, part)


def _mask_stops(logits: torch.Tensor, specs: Sequence[SamplerSpec], positions: Sequence[int]) -> torch.Tensor:
    rows = [
        row for row, spec in enumerate(specs) if spec.stop_ids and positions[row] - spec.prompt_len < spec.min_tokens
    ]
    if not rows:
        return logits
    before = _take(logits, rows)
    after = before.clone()
    ids = [np.asarray(specs[row].stop_ids) for row in rows]
    after.view(-1)[_cells(ids, logits.shape[-1], logits.device)] = _NEG_INF
    nothing_left = after.amax(dim=-1, keepdim=True) == _NEG_INF
    return _put(logits, rows, torch.where(nothing_left, before, after))


def _put(table: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> torch.Tensor:
    """A table with the rows replaced; the one given is left as it is."""
    if len(rows) == table.shape[0]:
        return part
    return table.index_copy(0, torch.tensor(rows, device=table.device), part)


# -- the distribution and the draw --------------------------------------------------------------


def _distribution(logits: torch.Tensor, specs: Sequence[SamplerSpec]) -> torch.Tensor:
    """Log-probs after temperature and filters: float64 [n, V], -inf for what was dropped."""
    scaled = logits.double()
    # the largest becomes 0 first, so that no temperature, however small, makes an overflow or a NaN
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / _column([spec.temperature for spec in specs], scaled)
    width = logits.shape[-1]

    rows = [row for row, spec in enumerate(specs) if 0 < spec.top_k < width]
    if rows:
        part = _take(scaled, rows)
        keep = _largest(part, [specs[row].top_k for row in rows])
        scaled = _put(scaled, rows, part.masked_fill(~keep, _NEG_INF))
    rows = [row for row, spec in enumerate(specs) if spec.top_p < 1.0]
    if rows:
        part = _take(scaled, rows)
        keep = _nucleus(part, _column([specs[row].top_p for row in rows], part))
        scaled = _put(scaled, rows, part.masked_fill(~keep, _NEG_INF))
    if any(spec.min_p > 0.0 for spec in specs):
        # the largest is 0 here, and every filter above keeps it
        floor = torch.log(_column([spec.min_p for spec in specs], scaled))
        scaled = scaled.masked_fill(scaled < floor, _NEG_INF)
    return torch.log_softmax(scaled, dim=-1)


def _largest(table: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """Mask of the k largest of each row, exactly k, the lower id first among equals.

    By value of the k-th largest, as the order that topk gives equals in may change with the batch.
    """
    k = torch.tensor(ks, device=table.device).unsqueeze(-1)
    bound = table.topk(max(ks), dim=-1).values.gather(-1, k - 1)
    above, equal = table > bound, table == bound
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _nucleus(table: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mask of the smallest set of each row whose probability reaches p; the lower id first among equals."""
    ordered, ids = table.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    keep = before < p
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, ids, keep)


def _draw(logprobs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over ascending ids: int64 [n]. Never an id of probability 0."""
    probs = logprobs.exp()
    cumulative = probs.cumsum(dim=-1)
    possible = probs > 0
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    # the target is scaled by the sum, which is 1 only up to rounding; a parallel prefix sum need not be
    # monotonic to the last bit, hence the mask and the last possible id as the upper end
    target = noise.unsqueeze(-1) * cumulative[:, -1:]
    first = torch.where((cumulative > target) & possible, ids, ids.numel()).amin(dim=-1)
    last = torch.where(possible, ids, -1).amax(dim=-1)
    return torch.minimum(first, last)


# -- log-probs ----------------------------------------------------------------------------------


def _report(
    table: torch.Tensor,
    tokens: torch.Tensor,
    rows: Sequence[int],
    chosen: list[float],
    top: list[TopLogprobs | None],
    ks: Sequence[int],
) -> None:
    """Write log-probs of the sampled tokens and the best alternatives of `rows` into the two lists.

    Args:
        table: log-probs [len(rows), V].
        ks: how many alternatives for each of `rows`; 0 for none.
    """
    picks = table.gather(-1, _take(tokens, rows).unsqueeze(-1)).squeeze(-1).tolist()
    for row, value in zip(rows, picks, strict=True):
        chosen[row] = value
    where = [i for i, k in enumerate(ks) if k > 0]
    if not where:
        return
    wanted = [min(ks[i], table.shape[-1]) for i in where]
    part = _take(table, where)
    keep = _largest(part, wanted)
    # row by row, ids ascending; the sort below is stable, which keeps them so among equals
    ids = keep.nonzero()[:, 1].cpu().numpy()
    values = part[keep].cpu().numpy()
    ends = np.cumsum(wanted)
    for i, k, end in zip(where, wanted, ends, strict=True):
        own, own_ids = values[end - k : end], ids[end - k : end]
        order = np.argsort(-own, kind="stable")
        order = order[: np.count_nonzero(own > _NEG_INF)]
        top[rows[i]] = TopLogprobs(tuple(own_ids[order].tolist()), tuple(own[order].tolist()))
