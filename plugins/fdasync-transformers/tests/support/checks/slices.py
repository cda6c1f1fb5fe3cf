"""Sums in slices: one process, two ranks and four give the same bits, and so does a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_trainer import fixed_numerics
from fdasync_transformers.tiny.families import FAMILIES
from rank_models import sliced_logits
from rollout_bits import batch_of, drawn, served_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from made import Made

SEQUENCES = drawn((37, 11, 3))
F32, BF16 = torch.float32, torch.bfloat16
# KV heads on several ranks; latents with cut heads, shared experts; transposed dense experts; identity experts. The
# other dtype of each takes as long again
BY_DAY = (("qwen3_moe", BF16), ("deepseek_v2", F32), ("llama4_text", F32), ("longcat_flash", BF16))
NO_PLAN = ("dbrx", "gpt_oss", "gpt_oss_mxfp4")
# that ranks cannot part by four
BY_TWO = ("laguna", "mimo_v2_flash")
BY_NIGHT = {
    name: [dtype for dtype in (F32, BF16) if (name, dtype) not in BY_DAY]
    for name, entry in FAMILIES.items()
    if not (entry.refused or entry.whole_only) and name not in NO_PLAN
}


def trainers_logits(model: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    model = served_in(model, dtype)
    arguments, real = batch_of(SEQUENCES, "left")
    with torch.no_grad(), fixed_numerics(model, **options):
        logits: torch.Tensor = model(**arguments).logits.flatten(0, 1)[real]
    return logits


def the_same_bits_at_any_width(made: Made, dtypes: Sequence[torch.dtype]) -> None:
    count = 2 if made.family in BY_TWO else 4
    (alone,) = sliced_logits(made.family, dtypes, SEQUENCES, 1, count)
    for ranks in (2, 4)[: count // 2]:
        for many in sliced_logits(made.family, dtypes, SEQUENCES, ranks, count):
            for dtype, one, other in zip(dtypes, alone, many, strict=True):
                assert torch.equal(other, one), (dtype, ranks)
    for dtype, one in zip(dtypes, alone, strict=True):
        assert torch.equal(trainers_logits(made.model(), dtype, sum_slices=count), one), dtype


def the_same_bits_by_night(made: Made) -> None:
    the_same_bits_at_any_width(made, BY_NIGHT[made.family])
