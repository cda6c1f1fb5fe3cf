"""Samples tokens and log-probs from logits, for a whole step at once, in three stages.

`plan_samples` plans on the host, before the logits exist. `compute_samples` samples on the device, and never waits for
it. `read_samples` makes lists of the results on the host, after they have arrived.

GPUs sample by the kernels of `fdasync_kernels.sampling`, CPUs by `math.py`: the same arithmetic, of whole numbers.
Every row is sampled on its own: the result for a row depends on its logits, its `SamplerSpec`, its position
and (for penalties) its history, never on the rows beside it. Noise is a function of (seed, sample index,
position) alone, so recomputing a position gives the same token. Knows nothing of models, sequences or
steps. Called by the parts of steps; pure, no state.

The order is: penalties, logit bias, mask of stop ids, grammars, temperature, top-k, top-p over what top-k left, min-p.
That is the order of transformers' own logits processors, but for the bias: behind the penalties it is added in full,
whatever the repetition penalty is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.result import TopLogprobs
from fdasync.runner.base import StepOutput
from fdasync_transformers.sampling.math import sample_on_host
from fdasync_transformers.sampling.plan import SamplePlan, plan_samples, uniform

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["SampleOutput", "SamplePlan", "compute_samples", "plan_samples", "read_samples", "uniform"]

_NEG_INF = float("-inf")


class SampleOutput(msgspec.Struct, frozen=True):
    """The samples of a step; one entry per row, in the order given.

    Attributes:
        tokens: sampled ids.
        raw, processed: log-prob of each sampled token; None when no row asked. 0.0 for rows that did not ask.
        top: alternatives, best first, ties by lower id, with the log-probs that they would have as samples; None when
            no row asked, or for rows that did not ask. Fewer than asked where fewer have a probability above 0.
    """

    tokens: list[int]
    raw: list[float] | None = None
    processed: list[float] | None = None
    top: list[TopLogprobs | None] | None = None

    def step_output(self, step_id: int) -> StepOutput:
        """The output of a step with these samples."""
        return StepOutput(
            step_id=step_id,
            tokens=tuple(self.tokens),
            raw=None if self.raw is None else tuple(self.raw),
            processed=None if self.processed is None else tuple(self.processed),
            top=None if self.top is None else tuple(self.top),
        )


def compute_samples(
    logits: torch.Tensor,
    plan: SamplePlan,
    sent: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Sample one token per row; on a GPU it queues work on the current stream and returns.

    On a GPU no operation reads a value back or has an output whose shape depends on values, and no tensor is made of
    host data: the plan has all numbers of the host. So a step can be launched while the device computes the step
    before it.

    Log-probs, natural logarithm, computed in float64 and rounded to float32: `raw` is the log-softmax of the logits as
    given. `processed` is the log-softmax of the distribution that was sampled from. A greedy row has no such
    distribution (its token has probability 1); `processed` then is the log-softmax of the logits after
    penalties, bias, stop mask and grammar, at temperature 1 and without filters: a trainer that recomputes log-probs of
    a greedy rollout gets the same.

    A greedy row takes the largest logit after penalties, bias, stop mask and grammar, the lowest id where several are
    equal; top-k, top-p and min-p cannot change that and are passed over. If a stop mask would leave no token
    at all, the row is not masked.

    Args:
        logits: [N, V] bfloat16, float16 or float32; read only.
        plan: of the same rows.
        sent: `plan.arrays`, and the masks of grammars where the plan has rows under one, as tensors on the device of
            `logits`; read only.
        tokens: int [lanes, max_tokens] on that device, the known tokens by lane, prompt first; row i has
            `tokens[lanes[i], :positions[i]]`. Read only, and only where `plan.needs_history`; else may be None. Ids
            outside the vocabulary are passed over.

    Returns:
        New tensors on the device of `logits`, the caller's, for `read_samples` (entries in the plan's order):
        `tokens` int64 [N], each within the vocabulary whatever the logits are; `finite` bool [N], False for rows
        that have NaN or +inf, or nothing finite; `raw` float32 and `processed` float64 [N], without a meaning for
        rows that do not ask; `top_values` float64 and `top_ids` int64, both [rows that ask, most of any], unordered,
        -inf behind a row's last alternative. Only the entries that the plan needs.

    Raises:
        InvariantBroken: the logits are not the plan's, or the known tokens are missing.
    """
    if logits.ndim != 2 or logits.shape[0] != plan.count:
        raise InvariantBroken(f"sample: logits {tuple(logits.shape)}, {plan.count} planned")
    if plan.needs_history and (tokens is None or tokens.shape[1] < plan.longest):
        width = "no" if tokens is None else tokens.shape[1]
        raise InvariantBroken(f"sample: {width} known tokens a lane, and penalties that look at {plan.longest}")
    if logits.is_cuda:
        results = sample_on_device(logits, plan, sent, tokens)
    elif plan.plain:
        # NaN wins a maximum, so the largest logit shows any bad one
        best, picks = logits.max(dim=-1)
        results = {"tokens": picks, "finite": torch.isfinite(best)}
    else:
        results = sample_on_host(logits, plan, sent, tokens)
    for name, wanted in (("raw", plan.raw), ("processed", plan.processed)):
        if not wanted.any():
            results.pop(name, None)
    return results


def sample_on_device(
    logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Sample by the kernels."""
    # not above: machines without a GPU need no Triton
    from fdasync_kernels.sampling.largest import largest_of_rows
    from fdasync_kernels.sampling.sample import sample_rows

    if plan.plain:
        picks, finite = largest_of_rows(logits)
        return {"tokens": picks, "finite": finite}

    sampled = sample_rows(logits, plan, sent, tokens)
    return {name: values for name, values in sampled._asdict().items() if values is not None}


def read_samples(
    plan: SamplePlan, arrays: Mapping[str, np.ndarray[Any, Any]], chosen: np.ndarray[Any, Any] | None = None
) -> SampleOutput:
    """Make lists of the results of `compute_samples`.

    Args:
        plan: of the same rows.
        arrays: the results, copied to the host: same names, shapes and dtypes. Read only, and not kept.
        chosen: int64 [M], the rows that count, ascending; None: all.

    Raises:
        RunnerError: a row that counts has NaN or +inf among its logits, or no finite one.
    """
    if chosen is not None:
        plan, arrays = _of_rows(plan, arrays, chosen)
    finite = arrays["finite"]
    if not finite.all():
        raise RunnerError(f"row {int(finite.argmin())} of the logits has NaN or +inf, or nothing finite")
    raw: list[float] | None = None
    processed: list[float] | None = None
    top: list[TopLogprobs | None] | None = None
    if "raw" in arrays:
        raw = np.where(plan.raw, arrays["raw"], 0.0).tolist()
    if "processed" in arrays:
        processed = np.where(plan.processed, _rounded(arrays["processed"]), 0.0).tolist()
    if "top_ids" in arrays:
        top = [None] * plan.count
        for row, values, ids in zip(plan.top_rows, arrays["top_values"], arrays["top_ids"], strict=True):
            # so that a token has one log-prob, among alternatives or sampled
            values = _rounded(values)
            order = np.lexsort((ids, -values))
            order = order[: np.count_nonzero(values > _NEG_INF)]
            top[row] = TopLogprobs(tuple(ids[order].tolist()), tuple(values[order].tolist()))
    return SampleOutput(arrays["tokens"].tolist(), raw, processed, top)


def _of_rows(
    plan: SamplePlan, arrays: Mapping[str, np.ndarray[Any, Any]], chosen: np.ndarray[Any, Any]
) -> tuple[SamplePlan, dict[str, np.ndarray[Any, Any]]]:
    """A plan and its results without the other rows."""
    asks = np.array(plan.top_rows, np.int64)
    kept = np.isin(asks, chosen)
    results = {name: values[kept if name.startswith("top_") else chosen] for name, values in arrays.items()}
    tops = tuple(np.searchsorted(chosen, asks[kept]).tolist())
    plan = msgspec.structs.replace(
        plan, count=len(chosen), raw=plan.raw[chosen], processed=plan.processed[chosen], top_rows=tops
    )
    return plan, results


def _rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As float32, in which raw ones come and results are kept; -inf where a tiny temperature leaves that range."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
