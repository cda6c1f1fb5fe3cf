"""What all kernels take: dtypes of rows, and the most experts. Imports no triton, so any code may ask."""

from __future__ import annotations

from typing import Final

import torch

#: of rows that are narrower than the float32 of sums
NARROW: Final = (torch.bfloat16, torch.float16)
#: of rows
FLOATS: Final = (torch.float32, *NARROW)
#: of a layer: one program of a router holds a token's logits, and one of the grouping their counts
MOST_EXPERTS: Final = 1024
