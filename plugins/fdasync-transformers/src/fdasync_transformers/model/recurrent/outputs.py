"""Outputs of mixers: the tensors that have an entry for each token, of pieces as of whole steps. Called by `steps.py`
and `probe.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def per_token(out: Any, sequences: int, tokens: int) -> tuple[torch.Tensor | None, ...]:
    """The tensors of an output that begin with [sequences, tokens]; None in the place of others."""
    values = out if isinstance(out, tuple) else (out,)
    shape = (sequences, tokens)
    return tuple(
        value if isinstance(value, torch.Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == shape else None
        for value in values
    )


def joined(outputs: Sequence[tuple[torch.Tensor | None, ...]]) -> tuple[torch.Tensor | None, ...]:
    """Outputs [1, tokens, ...] of pieces, joined to outputs of all tokens; None where a piece has none, since its shape
    was another output's by chance."""
    columns = []
    for column in zip(*outputs, strict=True):
        tensors = [one for one in column if one is not None]
        columns.append(torch.cat(tensors, 1) if len(tensors) == len(column) else None)
    return tuple(columns)
