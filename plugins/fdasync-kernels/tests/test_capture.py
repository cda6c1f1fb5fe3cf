"""A router's kernel writes the ids that it chose into the engine's capture buffer."""

from __future__ import annotations

import numpy as np
import torch
from fdasync_kernels.router.route import route

from fdasync.cache.aux import AuxSpec
from fdasync.gpu.capture import CaptureBuffer

SPEC = AuxSpec("routing", (3, 4), "uint8")


def rows_of(staged: torch.Tensor, spec: AuxSpec) -> np.ndarray:
    return staged.cpu().numpy().view(spec.dtype)


def test_a_router_writes_into_its_claim(device):
    buffer = CaptureBuffer(8, AuxSpec("routing", (2, 4), "uint16"), device)
    logits = torch.randn((6, 700), generator=torch.Generator().manual_seed(0)).to(device)
    buffer.begin()
    _, ids = route(logits, 3, weights_dtype=torch.float32, capture=buffer.claim(1, 6, 3))
    rows = rows_of(buffer.stage(6), buffer.spec)
    assert np.array_equal(rows[:, 1, :3], ids.cpu().numpy())
    assert not rows[:, 0].any()
    assert not rows[:, :, 3].any()
