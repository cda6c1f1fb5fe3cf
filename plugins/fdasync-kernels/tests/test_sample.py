"""Sampling and log-probs of rows against float64: `fdasync_kernels.sampling.sample`, `.log_masses` and `.gradients`.

Edits of logits, and what a sampler asks of the kernels, are tested with the sampler.
"""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.sampling.gradients import logit_gradients
from fdasync_kernels.sampling.log_masses import log_masses
from sampled_rows import WAYS, sampled

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of a wider table, poison beside them."""
    wide = torch.full((rows, width + 3), float("nan"))
    wide[:, :width] = torch.randn((rows, width), generator=torch.Generator().manual_seed(width)) * 3
    return wide.to(device, dtype)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 4099])
def test_tokens_and_their_log_probs(device, dtype, width):
    ways = list(WAYS)
    logits, noise = drawn(len(ways), width, dtype, device), torch.linspace(0.02, 0.98, len(ways))
    tokens, raw, processed = (one.cpu() for one in sampled(logits, ways, noise))
    for row, way in enumerate(ways):
        draws, scale, top_p, top_k = WAYS[way]
        values = logits[row].double().cpu()
        ordered = (values * scale).sort(descending=True, stable=True)
        shares = ordered.values.softmax(0)
        kept = int((shares.cumsum(0) - shares < top_p).sum()) if top_p < 1 else top_k or width
        mass = torch.zeros(width, dtype=torch.float64)
        mass[ordered.indices[:kept]] = shares[:kept] / shares[:kept].sum()
        # the first id whose masses, by ids in order, reach the noise
        wanted = int((mass.cumsum(0) > noise[row]).nonzero()[0]) if draws else int(ordered.indices[0])
        assert int(tokens[row]) == wanted, way
        assert float(raw[row]) == pytest.approx(float(values.log_softmax(0)[wanted]), rel=1e-6, abs=1e-6)
        if draws:
            assert float(processed[row]) == pytest.approx(float(mass[wanted].log()), rel=1e-9, abs=1e-9)


# what Triton's interpreter computes with says so of the ids behind a row's last
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4099)])
def test_normalisers_entropies_and_gradients(device, dtype, rows, width):
    logits, scale = drawn(rows, width, dtype, device), 0.7
    found = log_masses(logits, scale, entropy=True)
    exact = logits.double().detach().requires_grad_()
    logs = (exact * scale).log_softmax(-1)
    entropies = -(logs.exp() * logs).sum(-1)
    assert torch.equal(found.best.double(), exact.amax(-1))
    normaliser = torch.logsumexp((exact - exact.amax(-1, keepdim=True)) * scale, -1)
    torch.testing.assert_close(found.log_mass, normaliser.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.entropy, entropies.detach(), rtol=1e-7, atol=1e-9)
    targets = torch.arange(rows, device=device) + 1
    weights, entropy_weights = torch.randn((2, rows), generator=torch.Generator().manual_seed(rows)).to(device)
    into = torch.full_like(logits, float("nan"), dtype=torch.float32)
    logit_gradients(logits, targets, scale, found, weights, entropy_weights, into)
    (weights * logs[range(rows), targets] + entropy_weights * entropies).sum().backward()
    torch.testing.assert_close(into.double(), exact.grad, rtol=1e-5, atol=1e-7)
