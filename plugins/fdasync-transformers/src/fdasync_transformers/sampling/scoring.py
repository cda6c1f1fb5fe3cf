"""Scores tokens of prompts from logits, in three stages, as `sampler.py` samples: plan on the host, compute on the
device without a wait, read on the host.

Logits are made a few rows at a time, so that memory stays bounded whatever the prompt's length is. A token's log-prob
is that of the logits one position before it, with the bits of the sampler's raw ones (`token_logprobs.py`); nothing
that a request asks of sampling changes it.
Pure, no state; called by the parts of steps in which a prompt is scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fdasync.errors import RunnerError
from fdasync.runner.base import PromptScores
from fdasync_transformers.sampling.math import best_of
from fdasync_transformers.sampling.token_logprobs import logprobs_of, normalisers, picked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fdasync.runner.prompt_scores import ScoredRun

#: most rows whose logits exist at a time
SCORE_ROWS = 256


@dataclass(frozen=True)
class ScorePlan:
    """What a step scores.

    Attributes:
        runs: at least one.
        top: most alternatives of a run.
        arrays: for the device, int64 [N]: `rows` of the step, and `targets`, the token ids that they score.
    """

    runs: Sequence[ScoredRun]
    top: int
    arrays: dict[str, np.ndarray[Any, Any]]


def plan_scores(runs: Sequence[ScoredRun]) -> ScorePlan | None:
    """The plan for these runs; None where there are none."""
    if not runs:
        return None
    rows = np.concatenate([run.rows for run in runs])
    targets = np.concatenate([run.tokens for run in runs]).astype(np.int64)
    return ScorePlan(runs, max(run.top for run in runs), {"rows": rows, "targets": targets})


def compute_scores(
    logits_of: Callable[[torch.Tensor], torch.Tensor], plan: ScorePlan, sent: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Score the tokens of the plan; queues work on the current stream and returns.

    Args:
        logits_of: returns logits [n, V], of any float dtype, for n rows of the step, `SCORE_ROWS` at most.
        sent: `plan.arrays` as tensors on the device; read only.

    Returns:
        New tensors on the device, the caller's, for `read_scores`: `logprobs` float32 [N]; with alternatives also
        `top_logprobs` float32 [N, plan.top] and `top_ids` int64 [N, plan.top], unordered.
    """
    found = []
    for first in range(0, len(plan.arrays["rows"]), SCORE_ROWS):
        part = slice(first, first + SCORE_ROWS)
        logits = logits_of(sent["rows"][part])
        found.append(score_rows(logits, sent["targets"][part], plan.top))
        # the widest tensor: free it before the next one is made
        del logits
    return {name: torch.cat([values[name] for values in found]) for name in found[0]}


def score_rows(logits: torch.Tensor, targets: torch.Tensor, top: int) -> dict[str, torch.Tensor]:
    """As `compute_scores`, of rows [n, V] that are all there, and the tokens int64 [n] that they score."""
    sums = normalisers(logits)
    values = {"logprobs": logprobs_of(picked(logits, targets), sums)}
    if top:
        best, values["top_ids"] = best_of(logits.float(), top)
        values["top_logprobs"] = logprobs_of(best, sums)
    return values


def read_scores(plan: ScorePlan, arrays: Mapping[str, np.ndarray[Any, Any]]) -> tuple[PromptScores, ...]:
    """Make the step's scores of the results of `compute_scores`, copied to the host. Read only, and not kept.

    Raises:
        RunnerError: logits had NaN.
    """
    if np.isnan(arrays["logprobs"]).any():
        raise RunnerError("logits of a prompt have NaN")
    scores = []
    first = 0
    for run in plan.runs:
        part = slice(first, first + len(run.tokens))
        first = part.stop
        ids = np.zeros((len(run.tokens), 0), np.int64)
        best = np.zeros((len(run.tokens), 0), np.float32)
        if run.top:
            ids, best = arrays["top_ids"][part], arrays["top_logprobs"][part]
            # best first, the lower id first among equals
            order = np.lexsort((ids, -best), axis=-1)[:, : run.top]
            ids, best = np.take_along_axis(ids, order, -1), np.take_along_axis(best, order, -1)
            ids = np.where(np.isneginf(best), -1, ids)
        values = arrays["logprobs"][part].astype("<f4").tobytes()
        scores.append(
            PromptScores(
                key=run.key,
                start=run.start,
                logprobs=values,
                top=run.top,
                top_ids=ids.astype("<i4").tobytes(),
                top_logprobs=best.astype("<f4").tobytes(),
            )
        )
    return tuple(scores)
