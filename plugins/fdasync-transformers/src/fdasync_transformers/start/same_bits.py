"""Looks at start-up whether fixed numerics hold for a model: logits of a token have the same bits alone and in a batch.

The sequences of the self-check run once more, each alone in one step, and are compared with the mixed batch of chunks
and decodes, bit by bit. A model whose own code mixes sequences, or a library whose products have other bits here than
where they were measured, is refused. Knows no requests. Called by `open_model.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import UnsupportedModel
from fdasync_transformers.start.selfcheck import Reference, paged_passes

if TYPE_CHECKING:
    from fdasync_transformers.execution.step import StepModel


def check_bits(step_model: StepModel, reference: Reference, block_tokens: int) -> str:
    """Compare; returns the figures, for people. Raises UnsupportedModel where a bit differs."""
    mixed, _ = paged_passes(step_model, None, reference, block_tokens)
    differing = total = 0
    for ids, together in zip(reference.tokens, mixed, strict=True):
        (alone,), _ = paged_passes(step_model, None, Reference(((len(ids),),), (ids,), (), ()), block_tokens)
        differing += int((alone.view(torch.int32) != together.view(torch.int32)).any(-1).sum())
        total += len(ids)
    if differing:
        raise UnsupportedModel(
            str(step_model.model.config.model_type),
            f"numerics='fixed' does not hold for it here: logits of {differing} of {total} tokens have other bits in a"
            " mixed batch than alone",
        )
    return f"fixed numerics: logits of {total} tokens have the same bits alone and in a mixed batch"
