"""Samples tokens from logits on the device, and never waits for it.

No operation here reads a value back or has an output whose shape depends on values, and no tensor is made of host data:
the plan has all numbers of the host. So a step can be launched while the device computes the step before it. Knows
nothing of models, sequences or requests. Called by the executors, once per step, between `plan_samples` and
`read_samples`; pure, no state.

The order is: penalties, bias, stop mask, grammars, temperature, top-k, top-p over what top-k left, min-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from fdasync.errors import InvariantBroken
from old_sampling.plan import MASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from old_sampling.plan import Pick, Report, SamplePlan

_NEG_INF = float("-inf")
_WORD_BITS = 32


def compute_samples(
    logits: torch.Tensor,
    plan: SamplePlan,
    sent: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Sample one token per row; queues work on the current stream and returns.

    Args:
        logits: [N, V] of any float dtype; read only.
        sent: `plan.arrays`, and the masks of grammars where the plan has rows under one, as tensors on the device of
            `logits`; read only.
        plan: of the same rows.
        tokens: int [lanes, max_tokens] on that device, the known tokens by lane, prompt first; those of row i are
            `tokens[lanes[i], :positions[i]]`. Read only, and only where `plan.needs_history`; else may be None.
            Ids outside the vocabulary are passed over.

    Returns:
        New tensors on the device of `logits`, the caller's, for `read_samples` (entries in the plan's order):
        `tokens` int64 [N], each within the vocabulary whatever the logits are; `finite` bool [N], False for rows
        that have NaN or +inf, or nothing finite; `raw` float32 [rows that ask]; `processed` float64 [random rows,
        then greedy rows that ask]; `top_values` float64 and `top_ids` int64, both [rows that ask, most of any],
        unordered, -inf behind a row's last alternative. Only the entries that the plan needs.

    Raises:
        InvariantBroken: the logits are not the plan's, or the known tokens are missing.
    """
    if logits.ndim != 2 or logits.shape[0] != plan.count:
        raise InvariantBroken(f"sample: logits {tuple(logits.shape)}, {plan.count} planned")
    if plan.plain:
        best, picks = logits.max(dim=-1)
        return {"tokens": picks, "finite": torch.isfinite(best)}
    logits = logits.float()
    adjusted = _mask_stops(_bias(_penalise(logits, plan, sent, tokens), plan, sent), plan, sent)
    adjusted = _mask_grammars(adjusted, plan, sent)
    best, picks = adjusted.max(dim=-1)
    # NaN wins a maximum, so the largest logit shows any bad one
    finite = torch.isfinite(best if adjusted is logits else logits.amax(dim=-1))
    processed: list[torch.Tensor] = []
    tops: list[tuple[torch.Tensor, torch.Tensor]] = []
    if plan.random.count:
        chosen = [_take(values, plan.random, sent) for values in (adjusted, best, picks)]
        table = _distribution(chosen[0], chosen[1], plan, sent)
        drawn = _draw(table, sent["noise"], chosen[2])
        picks = _put(picks, plan.random, sent, drawn)
        if plan.processed:
            processed.append(_at(table, drawn))
        tops += _alternatives(table, plan.drawn_report, sent, plan.most_tops)
        del table, chosen  # the widest tensors: free them before the next tables are made
    if plan.greedy.count:
        table = torch.log_softmax(_take(adjusted, plan.greedy, sent).double(), dim=-1)
        processed.append(_at(table, _take(picks, plan.greedy, sent)))
        tops += _alternatives(table, plan.greedy_report, sent, plan.most_tops)
    results = {"tokens": picks, "finite": finite}
    if plan.raw.count:
        table = torch.log_softmax(_take(logits, plan.raw, sent), dim=-1)
        results["raw"] = _at(table, _take(picks, plan.raw, sent))
        tops += _alternatives(table, plan.raw_report, sent, plan.most_tops)
    if processed:
        results["processed"] = _joined(processed)
    if tops:
        results["top_values"] = _joined([values for values, _ in tops])
        results["top_ids"] = _joined([ids for _, ids in tops])
    return results


def _take(table: torch.Tensor, pick: Pick, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The picked rows; the tensor itself if they are all its rows."""
    return table.index_select(0, sent[pick.name]) if pick.name else table


def _put(table: torch.Tensor, pick: Pick, sent: Mapping[str, torch.Tensor], part: torch.Tensor) -> torch.Tensor:
    """A new table with the picked rows replaced."""
    return table.index_copy(0, sent[pick.name], part) if pick.name else part


def _at(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One value of each row."""
    return table.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# -- before the softmax -------------------------------------------------------------------------


def _penalise(
    logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> torch.Tensor:
    """Repetition (arXiv 1909.05858; prompt and output), presence and frequency penalties (output)."""
    if not plan.penalised.count:
        return logits
    if tokens is None or tokens.shape[1] < plan.longest:
        width = "no" if tokens is None else tokens.shape[1]
        raise InvariantBroken(f"sample: {width} known tokens a lane, and penalties that look at {plan.longest}")
    part = _take(logits, plan.penalised, sent)
    width = logits.shape[-1]
    ids = tokens.narrow(1, 0, plan.longest).index_select(0, sent["lanes"]).long()
    places = torch.arange(plan.longest, device=logits.device)
    counted = (ids >= 0) & (ids < width) & (places < sent["ends"].unsqueeze(-1))
    # one column more than the vocabulary, for tokens that do not count
    wide = (plan.penalised.count, width + 1)
    if "repetition" in sent:
        seen = torch.zeros(wide, dtype=torch.bool, device=logits.device)
        seen = seen.scatter_(-1, ids.masked_fill(~counted, width), True)[:, :width]
        factor = sent["repetition"].unsqueeze(-1)
        part = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    if "presence" in sent:
        counted &= places >= sent["prompt_lens"].unsqueeze(-1)
        counts = torch.zeros(wide, dtype=part.dtype, device=logits.device)
        ones = torch.ones_like(ids, dtype=part.dtype)
        # whole numbers: the order of the additions changes nothing
        counts = counts.scatter_add_(-1, ids.masked_fill(~counted, width), ones)[:, :width]
        presence, frequency = sent["presence"].unsqueeze(-1), sent["frequency"].unsqueeze(-1)
        part = part - frequency * counts - presence * (counts > 0)
    return _put(logits, plan.penalised, sent, part)


def _bias(logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not plan.biased.count:
        return logits
    part = _take(logits, plan.biased, sent)
    width = logits.shape[-1]
    # one column more than the vocabulary, for ids outside it; no cell of the vocabulary stands twice
    cells = sent["bias_at"] * (width + 1) + sent["bias_ids"].clamp(max=width)
    part = pad(part, (0, 1)).view(-1).index_add_(0, cells, sent["bias"]).view(-1, width + 1)[:, :width]
    return _put(logits, plan.biased, sent, part)


def _mask_stops(logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not plan.stopped.count:
        return logits
    before = _take(logits, plan.stopped, sent)
    width = logits.shape[-1]
    # one column more than the vocabulary, for ids outside it
    cells = sent["stop_at"] * (width + 1) + sent["stop_ids"].clamp(max=width)
    after = pad(before, (0, 1)).view(-1).index_fill_(0, cells, _NEG_INF).view(-1, width + 1)[:, :width]
    nothing_left = after.amax(dim=-1, keepdim=True) == _NEG_INF
    return _put(logits, plan.stopped, sent, torch.where(nothing_left, before, after))


def _mask_grammars(logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not plan.masked.count:
        return logits
    words = sent[MASKS]
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    # an arithmetic shift: the lowest bit is the token's whatever the sign
    allowed = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    part = _take(logits, plan.masked, sent).masked_fill(~allowed, _NEG_INF)
    return _put(logits, plan.masked, sent, part)


# -- the distribution and the draw --------------------------------------------------------------


def _distribution(
    logits: torch.Tensor, best: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Log-probs after temperature and filters: float64 [n, V], -inf for dropped ids."""
    # the largest logit becomes 0 first, so that no temperature, however small, makes an overflow or a NaN; the
    # subtraction also makes the table float64
    scaled = logits - best.double().unsqueeze(-1)
    if "temperature" in sent:
        scaled.div_(sent["temperature"].unsqueeze(-1))
    if plan.top_k.count:
        part = _take(scaled, plan.top_k, sent)
        keep = _largest(part, sent["top_k"], plan.most)
        scaled = _put(scaled, plan.top_k, sent, part.masked_fill(~keep, _NEG_INF))
    if plan.top_p.count:
        part = _take(scaled, plan.top_p, sent)
        keep = _nucleus(part, sent["top_p"].unsqueeze(-1))
        scaled = _put(scaled, plan.top_p, sent, part.masked_fill(~keep, _NEG_INF))
    if "min_p" in sent:
        # the largest is 0 here, and every filter above keeps it
        floor = torch.log(sent["min_p"]).unsqueeze(-1)
        scaled.masked_fill_(scaled < floor, _NEG_INF)
    return torch.log_softmax(scaled, dim=-1)


def _largest(table: torch.Tensor, ks: torch.Tensor, most: int) -> torch.Tensor:
    """Mask of the k largest of each row, exactly k, the lower id first among equals.

    By value of the k-th largest, since topk's order of equals may change with the batch.

    Args:
        ks: int64, one for each row, 1 to `most`; a k above the width takes all.
    """
    width = table.shape[-1]
    k = ks.clamp(max=width).unsqueeze(-1)
    bound = table.topk(min(most, width), dim=-1).values.gather(-1, k - 1)
    above, equal = table > bound, table == bound
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))


def _nucleus(table: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mask of the smallest set of each row whose probability reaches p; the lower id first among equals."""
    ordered, ids = table.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    keep = before < p
    keep[:, :1].fill_(True)
    return torch.zeros_like(keep).scatter(-1, ids, keep)


def _draw(logprobs: torch.Tensor, noise: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over ascending ids: int64 [n]. Never an id of probability 0, nor one outside the vocabulary.

    A parallel prefix sum need not be monotonic to the last bit. So on some devices, with noise within that bit of a
    step of the CDF, the search can end beside the step, on an id of probability 0. A sequential sum cannot: the found
    id raised it. Then the result is the likeliest id: that costs [n], and a search for the nearest possible id would
    cost passes over [n, V] in every step.
    """
    cumulative = logprobs.exp().cumsum_(dim=-1)
    # the target is scaled by the sum, which is 1 only up to rounding; it is below the sum, as noise is below 1
    target = noise.unsqueeze(-1) * cumulative[:, -1:]
    # in range whatever the sums are: the index of a row of NaN must not break the device
    found = torch.searchsorted(cumulative, target, right=True).clamp_(max=logprobs.shape[-1] - 1)
    possible = logprobs.gather(-1, found).exp() > 0
    return torch.where(possible, found, likeliest.unsqueeze(-1)).squeeze(-1)


# -- log-probs ----------------------------------------------------------------------------------


def _alternatives(
    table: torch.Tensor, report: Report, sent: Mapping[str, torch.Tensor], most: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values (float64) and ids of the best of each row that asks: [(values, ids)], or [] if no row asks.

    Exactly k of each row are kept before topk, so that topk has no choice among equals.
    """
    if not report.tops.count:
        return []
    part = _take(table, report.tops, sent)
    values, ids = _best(part, sent[report.ks], most)
    return [(values.double(), ids)]


def best_of(table: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids, both [n, k], of the k largest of each row, exactly those of lower ids among equals; unordered. k
    is at most the width."""
    return _best(table, torch.full((table.shape[0],), k, dtype=torch.int64, device=table.device), k)


def _best(table: torch.Tensor, ks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    keep = _largest(table, ks, most)
    values, ids = table.masked_fill(~keep, _NEG_INF).topk(min(most, table.shape[-1]), dim=-1)
    return values, ids
