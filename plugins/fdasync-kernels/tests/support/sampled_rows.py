"""Rows of logits sampled in each way there is, by one call of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fdasync_kernels.sampling.sample import sample_rows


@dataclass
class Jobs:
    """Rows without edits, for `sample_rows`."""

    count: int
    jobs: int
    nuclei: bool
    most: int
    longest: int = 0
    edited: int = 0
    stopped: int = 0
    masked: int = 0
    masses: bool = True
    most_tops: int = 0


# ways of sampling: whether a token is drawn, what logits are multiplied by, top-p and top-k
WAYS = {"greedy": (0, 1.0, 1.0, 0), "drawn": (1, 1.0, 1.0, 0), "cold": (1, 4.0, 1.0, 0), "nucleus": (1, 1.0, 0.9, 0),
        "cold nucleus": (1, 1.5, 0.01, 0), "top 1": (1, 0.7, 1.0, 1), "top 5": (1, 1.0, 1.0, 5)}  # fmt: skip


def sampled(logits: torch.Tensor, ways: list[str], noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tokens, and their raw and processed log-probs, a way and a number in [0, 1) for each row."""
    ints, floats = [], []
    for row, way in enumerate(ways):
        drawn, scale, top_p, top_k = WAYS[way]
        raw = row if scale == 1.0 else len(ways) + sum(WAYS[other][1] != 1.0 for other in ways[:row])
        ints.append([row, -1, -1, -1, 1, drawn, top_k, raw])
        floats.append([scale, float(noise[row]), top_p, -float("inf")])
    for row, way in enumerate(ways):
        if WAYS[way][1] != 1.0:
            ints.append([row, -1, -1, -1, 1, 0, 0, -1])
            floats.append([1.0, 0.0, 1.0, -float("inf")])
    nuclei = any(WAYS[way][2] < 1.0 for way in ways)
    asked = Jobs(len(ways), len(ints), nuclei, max(WAYS[way][3] for way in ways))
    sent = {"ints": torch.tensor(ints, device=logits.device),
            "floats": torch.tensor(floats, dtype=torch.float64, device=logits.device)}  # fmt: skip
    found = sample_rows(logits, asked, sent, None)
    assert bool(found.finite.all())
    return found.tokens, found.raw, found.processed
