"""Slots that are chosen one after the other against float64: `router/in_turn.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.router.in_turn import route_in_turn


def in_turn(logits: torch.Tensor, k: int, near: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot by slot in float64, the lowest id first."""
    logits = logits.double()
    rest = logits.clone()
    weights, ids = [], []
    for _ in range(k):
        top = rest.max(-1, keepdim=True).values
        best = (rest == top).float().argmax(-1, keepdim=True)
        far = (top - logits) / torch.maximum(logits.abs(), top) > near
        share = torch.softmax(rest.masked_fill(far, float("-inf")), -1)
        weights.append(share.gather(1, best))
        ids.append(best)
        rest = rest.scatter(1, best, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 16, 2), (50, 16, 2), (7, 11, 3)])
def test_it_chooses_slot_by_slot(device, tokens, experts, k):
    logits = torch.randn((tokens, experts), generator=torch.Generator().manual_seed(1)).to(device)
    capture = torch.full((tokens, k + 1), 99, dtype=torch.uint8, device=device)
    # near enough that most rows have experts on either side
    weights, ids = route_in_turn(logits, k, 0.4, capture)
    exact, chosen = in_turn(logits, k, 0.4)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0.0)
    assert torch.equal(capture[:, :k].long(), ids)
    assert (capture[:, k] == 99).all()
    assert ids.dtype == torch.int64


def test_ties_zeros_and_bfloat16(device):
    logits = torch.zeros((2, 8), device=device, dtype=torch.bfloat16)
    logits[1, 3:6] = 2.0
    weights, ids = route_in_turn(logits, 2, 0.02)
    assert ids.tolist() == [[0, 1], [3, 4]]
    torch.testing.assert_close(weights[0].float().cpu(), torch.tensor([1 / 8, 1 / 7]), rtol=0.004, atol=0.0)
    torch.testing.assert_close(weights[1].float().cpu(), torch.tensor([1 / 3, 1 / 2]), rtol=0.004, atol=0.0)
    assert weights.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_ids_exist_and_do_not_repeat_whatever_comes(device):
    logits = torch.randn((4, 9), generator=torch.Generator().manual_seed(2))
    logits[0, 2] = float("nan")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, :4] = float("inf")
    _, ids = route_in_turn(logits.to(device), 9, 0.02)
    assert torch.equal(ids.sort(-1).values.cpu(), torch.arange(9).expand(4, -1))
    weights, ids = route_in_turn(logits[:0].to(device), 2, 0.02)
    assert weights.shape == ids.shape == (0, 2)
