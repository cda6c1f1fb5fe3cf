"""Sums in slices: one process, two ranks and four give the same bits, and so does a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers import fixed_numerics
from fdasync_transformers.fixed.logprobs import logprobs_of_logits
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.verification.reference import library_model
from rank_play import PROMPTS, play

if TYPE_CHECKING:
    from pathlib import Path

SLICED: dict[str, Any] = {"numerics": "fixed", "sum_slices": 4}
# shared experts and latents with cut heads; identity experts; transposed dense experts; dense
FAMILIES = ("qwen3_moe", "deepseek_v2", "longcat_flash", "llama4_text", "qwen3_dense")


def config_of(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "experts": "auto"}


def trained(folder: Path, dtype: str, tokens: list[list[int]], **options: Any) -> list[torch.Tensor]:
    model: Any = library_model(folder, getattr(torch, dtype), alone=True)
    found = []
    with torch.no_grad(), fixed_numerics(model, **options):
        for prompt, sampled in zip(PROMPTS, tokens, strict=True):
            ids = torch.tensor([[*prompt, *sampled]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            found.append(logprobs_of_logits(logits, ids[0, len(prompt) :]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_ranks(tmp_path: Path, family: str, dtype: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    (one,) = play(tmp_path, config=config_of(dtype), **SLICED)
    for ranks in (2, 4):
        first = play(tmp_path, ranks, config=config_of(dtype), **SLICED)[0]
        assert first.tokens == one.tokens
        assert all(torch.equal(mine, other) for mine, other in zip(first.logits, one.logits, strict=True) if len(other))
        assert all(np.array_equal(mine, other) for mine, other in zip(first.rows, one.rows, strict=True))
        assert first.raw == one.raw
        assert first.capacity.fingerprint == one.capacity.fingerprint
    for mine, wanted in zip(trained(tmp_path, dtype, one.tokens, sum_slices=4), one.raw, strict=True):
        assert mine.tolist() == wanted
