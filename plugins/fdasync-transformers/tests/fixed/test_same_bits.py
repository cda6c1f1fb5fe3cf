"""Logits of a token have the same bits alone, in chunks, as decodes and beside other sequences."""

from __future__ import annotations

import pytest
import torch
from bits import play, prompts_of, step_model_of

ALONE = (150, 37, 5, 70)
STEPS = [
    [(0, 33), (1, 1), (2, 5)],
    [(0, 60), (1, 35), (3, 7)],
    [(0, 47), (3, 62)],
    *([[(0, 1), (1, 1), (3, 1)]] + [[(0, 1)]] * 9),
]
FAMILIES = (
    "qwen3_moe",
    "deepseek_v2",
    "gpt_oss",
    "llama4_text",
    "phimoe",
    "granitemoe",
    "qwen3_moe_swa",
    "longcat_flash",
)


def differing(family, dtype, *, fixed):
    """Rows of logits with other bits in the mixed steps, and those of the sequences alone."""
    step_model = step_model_of(family, dtype, fixed=fixed)
    tokens = prompts_of(step_model, *ALONE)
    alone = [play(step_model, [ids], [[(0, len(ids))]], 16)[0] for ids in tokens]
    mixed = play(step_model, tokens, STEPS, 16)
    assert sum(map(len, mixed)) == sum(ALONE)
    return sum(int((one != other).any(-1).sum()) for one, other in zip(alone, mixed, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_float32(family):
    assert differing(family, torch.float32, fixed=True) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_families_in_bfloat16(family):
    assert differing(family, torch.bfloat16, fixed=True) == 0


def test_the_default_does_not_promise_them():
    """So the tests above can fail."""
    assert differing("qwen3_moe", torch.float32, fixed=False) > 100


def test_blocks_of_other_sizes_change_nothing():
    step_model = step_model_of("qwen3_moe_swa", torch.float32, fixed=True)
    (tokens,) = prompts_of(step_model, 100)
    results = [play(step_model, [tokens], [[(0, 61)], [(0, 39)]], size)[0] for size in (4, 16, 48, 64, 128)]
    assert all(torch.equal(results[0], one) for one in results)
