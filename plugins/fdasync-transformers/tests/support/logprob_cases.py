"""What tests of log-probs share: where they run, the dtypes, and bits of results."""

from __future__ import annotations

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(values: torch.Tensor) -> list[int]:
    """Of float32 numbers, so that NaN and the sign of zero count."""
    assert values.dtype is torch.float32
    found: list[int] = values.detach().view(torch.int32).tolist()
    return found
