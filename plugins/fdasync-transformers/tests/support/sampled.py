"""The three stages of sampling in a row, for rows that are all there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.sampling.plan import MASKS
from fdasync_transformers.sampling.sampler import compute_samples, plan_samples, read_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_transformers.sampling.sampler import SampleOutput

    from fdasync.request import SamplerSpec


def sample(
    logits: torch.Tensor,
    specs: Sequence[SamplerSpec],
    positions: Sequence[int],
    histories: Sequence[np.ndarray[Any, Any]],
    masks: np.ndarray[Any, Any] | None = None,
) -> SampleOutput:
    """One token per row of `logits`, at these positions, behind all known tokens of each row; `masks` are of the rows
    under a grammar."""
    plan = plan_samples(specs, positions, range(len(specs)), [len(history) for history in histories])
    sent = {name: torch.from_numpy(values).to(logits.device) for name, values in plan.arrays.items()}
    if masks is not None:
        sent[MASKS] = torch.from_numpy(masks).to(logits.device)
    known = torch.from_numpy(_side_by_side(histories)).to(logits.device) if plan.needs_history else None
    results = compute_samples(logits, plan, sent, known)
    return read_samples(plan, {name: values.cpu().numpy() for name, values in results.items()})


def _side_by_side(histories: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """A table of known tokens, row by row; entries past a row's end have no meaning."""
    table = np.zeros((len(histories), max(len(history) for history in histories)), np.int64)
    for row, history in zip(table, histories, strict=True):
        row[: len(history)] = history
    return table
