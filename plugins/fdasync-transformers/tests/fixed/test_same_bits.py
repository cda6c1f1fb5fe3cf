"""Logits of a token have the same bits alone, in chunks, as decodes and beside other sequences."""

from __future__ import annotations

import pytest
import torch
from bits import play, prompts_of, step_model_of
from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.fused.live_rows import LiveRows
from structures import by_structure, in_turn

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
# most of a second each: one in `make test`, the others in `make test-ci`
HALF = ("qwen3_moe", "deepseek_v2", "gpt_oss")
KERNELS = ("qwen3_moe_swa", "deepseek_v2", "gpt_oss")


def differing(family, dtype, *, fixed):
    """Rows of logits with other bits in the mixed steps, and those of the sequences alone."""
    step_model = step_model_of(family, dtype, fixed=fixed)
    tokens = prompts_of(step_model, *ALONE)
    alone = [play(step_model, [ids], [[(0, len(ids))]], 16)[0] for ids in tokens]
    mixed = play(step_model, tokens, STEPS, 16)
    assert sum(map(len, mixed)) == sum(ALONE)
    return sum(int((one != other).any(-1).sum()) for one, other in zip(alone, mixed, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("family", by_structure(FAMILIES))
def test_families_in_float32(family):
    assert differing(family, torch.float32, fixed=True) == 0


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn(HALF, ["qwen3_moe"], HALF))
def test_families_in_bfloat16(family):
    assert differing(family, torch.bfloat16, fixed=True) == 0


def test_the_default_does_not_promise_them():
    """So the tests above can fail."""
    assert differing("qwen3_moe", torch.float32, fixed=False) > 100


@pytest.mark.ci
def test_blocks_of_other_sizes_change_nothing():
    step_model = step_model_of("qwen3_moe_swa", torch.float32, fixed=True)
    (tokens,) = prompts_of(step_model, 100)
    results = [play(step_model, [tokens], [[(0, 61)], [(0, 39)]], size)[0] for size in (4, 16, 48, 64, 128)]
    assert all(torch.equal(results[0], one) for one in results)


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn(KERNELS, ["deepseek_v2"], KERNELS))
def test_kernels_in_their_fixed_order_compute_the_same(family):
    """Their bits are a GPU's to show; here the interpreter's products change with their shape."""
    plain = step_model_of(family, torch.float32, fixed=True)
    tokens = prompts_of(plain, 70, 20)
    steps = [[(0, 40), (1, 20)], [(0, 29)], [(0, 1)]]
    wanted = play(plain, tokens, steps, 16)
    kernels = DeviceStepModel(plain.model, plain.layout, 2, live=LiveRows(), fixed=True)
    for one, other in zip(play(kernels, tokens, steps, 16), wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
