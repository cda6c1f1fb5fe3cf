"""One log-prob of a token: the sampler's, the scores' and the function's have the same bits, whatever is asked for.

The kernels run on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_kernels.sampling import tile
from fdasync_transformers.sampling.math import sample_on_host
from fdasync_transformers.sampling.plan import plan_samples
from fdasync_transformers.sampling.sampler import sample_on_device
from fdasync_transformers.sampling.scoring import compute_scores, plan_scores, read_scores
from fdasync_transformers.sampling.token_logprobs import (
    Normalisers,
    logprobs_of,
    normalisers,
    normalisers_on_device,
    picked,
    token_logprobs,
)
from logprob_cases import CUDA, DEVICE, DTYPES, bits
from sampled import sample
from sampler_cases import spec

from fdasync.runner.prompt_scores import ScoredRun
from fdasync.testing.runners.scores import parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.request import SamplerSpec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# filters that a request may ask for; nothing of them changes a raw log-prob
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8123457},
    {"temperature": 3.0, "top_k": 9, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.0, "bias": {1: 2.0}},
    {"temperature": 0.9, "repetition_penalty": 1.3},
]


def table(width: int, dtype: torch.dtype, rows: int = 9, seed: int = 0) -> torch.Tensor:
    """Rows of many kinds: sharp, flat, ties, holes, one token alone, huge."""
    random = np.random.default_rng(seed + width)
    x = random.normal(size=(rows, width)) * np.resize([8.0, 0.5, 2.0], rows)[:, None]
    if rows >= 8 and width > 3:
        x[3] = np.round(x[3])
        x[4, random.random(width) < 0.6] = -np.inf
        x[4, 0] = 0.25
        x[5] = -np.inf
        x[5, width // 2] = -3.0
        x[6] *= 800.0
        x[7] = 1.5
    return torch.from_numpy(x).float().to(dtype)


def sampled(on: Callable[..., Any], logits: torch.Tensor, asked: list[SamplerSpec]) -> dict[str, torch.Tensor]:
    count = len(asked)
    plan = plan_samples(asked, [5] * count, range(count), [5] * count)
    device = DEVICE if on is sample_on_device else torch.device("cpu")
    sent = {name: torch.from_numpy(values).to(device) for name, values in plan.arrays.items()}
    known = torch.tensor([[0, 1, 0, 1, 0]] * count, device=device)
    return {name: values.cpu() for name, values in on(logits.to(device), plan, sent, known).items()}


def sums_of(on: Callable[..., Any], logits: torch.Tensor, temperature: float = 1.0) -> Normalisers:
    if on is sample_on_device:
        return normalisers_on_device(logits.to(DEVICE), temperature=temperature)
    return normalisers(logits, temperature=temperature)


def ours(on: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    sums = sums_of(on, logits, temperature)
    device = sums.best.device
    return logprobs_of(picked(logits.to(device), targets.to(device)), sums).cpu()


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small block as for a large one."""
    if not CUDA:
        for name in ("sample._SPAN", "sample._MASSES_BLOCK", "log_masses._BLOCK"):
            monkeypatch.setattr(f"fdasync_kernels.sampling.{name}", tile.TILE)


HOST = [(sample_on_host, width, dtype) for width in (11, 1009, 9001) for dtype in DTYPES]
KERNELS = [
    pytest.param(sample_on_device, width, dtype, marks=pytest.mark.gpu)
    for width in (11, 5003, 50_257)
    for dtype in DTYPES
]


@pytest.mark.parametrize(("on", "width", "dtype"), [*HOST, *KERNELS])
def test_raw_ones_are_the_samplers_whatever_a_request_asks_for(
    on: Callable[..., Any], width: int, dtype: torch.dtype
) -> None:
    logits = table(width, dtype)
    asked = [spec(seed=row, raw=True, processed=True, top=2, **ASKED[row]) for row in range(len(ASKED))]
    found = sampled(on, logits, asked)
    assert found["finite"].all()
    assert bits(found["raw"]) == bits(ours(on, logits, found["tokens"]))
    # the same row, asked for with other filters and beside other rows
    for row in (0, 4, 6):
        alone = sampled(on, logits[row : row + 1], [spec(raw=True, temperature=1.0, top_k=1, seed=9)])
        assert bits(alone["raw"]) == bits(ours(on, logits[row : row + 1], alone["tokens"]))
    # alternatives are made of the same sums
    sums = sums_of(on, logits)
    values = logits.float().gather(1, found["top_ids"]).to(sums.best.device)
    real = found["top_values"] > -math.inf
    wanted = logprobs_of(values, sums).cpu()
    assert bits(found["top_values"].float()[real]) == bits(wanted[real])


def test_the_kernels_of_the_interpreter_agree_too() -> None:
    """A few rows, where rows of all kinds take a GPU."""
    width = tile.TILE + 7
    logits = table(width, torch.bfloat16)[[0, 4]]
    asked = [spec(seed=3, raw=True, processed=True, top=2, temperature=t) for t in (1.0, 0.7)]
    found = sampled(sample_on_device, logits, asked)
    assert bits(found["raw"]) == bits(ours(sample_on_device, logits, found["tokens"]))
    assert bits(found["processed"][1:].float()) == bits(ours(sample_on_device, logits[1:], found["tokens"][1:], 0.7))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 0.01, 0.7, 1.0, 1.3, 50.0])
@pytest.mark.parametrize(("on", "width", "dtype"), [*HOST, *KERNELS])
def test_processed_ones_are_the_samplers_under_a_temperature(
    on: Callable[..., Any], width: int, dtype: torch.dtype, temperature: float
) -> None:
    logits = table(width, dtype, seed=1)
    asked = [spec(seed=row, processed=True, temperature=temperature) for row in range(len(logits))]
    found = sampled(on, logits, asked)
    # a result keeps float32
    assert bits(found["processed"].float()) == bits(ours(on, logits, found["tokens"], temperature))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 257, 4099])
def test_a_row_has_the_same_bits_alone_and_among_others(width: int, dtype: torch.dtype) -> None:
    logits = table(width, dtype, rows=17)
    targets = torch.arange(17) % width
    together = token_logprobs(logits, targets)
    alone = torch.cat([token_logprobs(logits[row : row + 1], targets[row : row + 1]) for row in range(17)])
    # of a table with wider rows: other strides and alignments
    wide = torch.nn.functional.pad(logits, (3, 2))[:, 3 : 3 + width]
    assert bits(together) == bits(alone) == bits(token_logprobs(wide, targets))
    exact = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
    assert torch.equal(torch.isneginf(together), torch.isneginf(exact))
    kept = ~torch.isneginf(exact)
    # rounded once
    assert torch.allclose(together[kept].double(), exact[kept], rtol=2**-23, atol=1e-11)


def test_the_kernels_sums_are_the_hosts() -> None:
    """To the last bits of a float64, in which exponentials differ."""
    logits = table(tile.TILE + 9, torch.float32)
    for temperature in (1.0, 0.6):
        host = normalisers(logits, temperature=temperature, entropy=True)
        device = normalisers_on_device(logits.to(DEVICE), temperature=temperature, entropy=True)
        assert torch.equal(host.best, device.best.cpu())
        assert torch.allclose(host.log_mass, device.log_mass.cpu(), rtol=0, atol=1e-9)
        assert host.entropy is not None
        assert device.entropy is not None
        assert torch.allclose(host.entropy, device.entropy.cpu(), rtol=0, atol=1e-9)
        probs = torch.softmax(logits.double() / temperature, -1)
        assert torch.allclose(host.entropy, torch.special.entr(probs).sum(-1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("make", [normalisers, lambda x: normalisers_on_device(x.to(DEVICE))])
def test_what_has_no_log_prob_is_nan(make: Callable[[torch.Tensor], Normalisers]) -> None:
    row = [1.0, 2.0, -math.inf]
    logits = torch.tensor([row, [1.0, math.nan, 0.0], [math.inf, 0.0, 0.0], [-math.inf] * 3, row, row])
    targets = torch.tensor([2, 0, 1, 0, 3, -1])
    sums = make(logits)
    device = sums.best.device
    found = logprobs_of(picked(logits.to(device), targets.to(device)), sums).cpu()
    assert found[0] == -math.inf
    assert torch.isnan(found[1:]).all()
    assert len(make(logits[:0]).log_mass) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1009])
def test_scores_of_prompts_have_the_samplers_bits(width: int, dtype: torch.dtype) -> None:
    logits = table(width, dtype)
    asked = [spec(seed=row, raw=True, top=3, temperature=1.0) for row in range(len(logits))]
    found = sampled(sample_on_device if CUDA else sample_on_host, logits, asked)
    tokens = found["tokens"].numpy().astype(np.int32)
    plan = plan_scores([ScoredRun(1, 1, 0, tokens, 3)])
    assert plan is not None
    on = logits.to(DEVICE)
    sent = {name: torch.from_numpy(values).to(DEVICE) for name, values in plan.arrays.items()}
    results = compute_scores(lambda rows: on[rows], plan, sent)
    (scores,) = read_scores(plan, {name: values.cpu().numpy() for name, values in results.items()})
    values, ids, best = parts(scores)
    assert bits(torch.tensor(values)) == bits(found["raw"])
    for row in range(len(logits)):
        kept = found["top_values"][row] > -math.inf
        wanted = dict(zip(found["top_ids"][row][kept].tolist(), found["top_values"][row][kept].tolist(), strict=True))
        given = {i: v for i, v in zip(ids[row].tolist(), best[row].tolist(), strict=True) if i >= 0}
        assert given == {i: float(np.float32(v)) for i, v in wanted.items()}


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_an_alternative_is_told_with_the_log_prob_of_a_sample(kind: str) -> None:
    logits = table(1009, torch.bfloat16)
    own = [spec(seed=row, temperature=1e-300 if row == 1 else 0.8, top=20, **{kind: True}) for row in range(9)]
    told = sample(logits, own, [5] * 9, [np.zeros(5, np.int32)] * 9)
    assert told.top is not None
    found = told.raw if kind == "raw" else told.processed
    assert found is not None
    seen = 0
    for token, value, top in zip(told.tokens, found, told.top, strict=True):
        assert top is not None
        assert value == float(np.float32(value))
        if token in top.token_ids:
            seen += 1
            assert top.logprobs[top.token_ids.index(token)] == value
    assert seen > 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_row_has_one_log_prob_on_a_gpu(dtype: torch.dtype) -> None:
    logits = table(151_936, dtype, rows=300, seed=4)
    temperatures = [1.0, 0.7]
    for temperature in temperatures:
        asked = [spec(seed=row, raw=True, processed=True, temperature=temperature) for row in range(len(logits))]
        found = sampled(sample_on_device, logits, asked)
        assert bits(found["raw"]) == bits(ours(sample_on_device, logits, found["tokens"]))
        assert bits(found["processed"].float()) == bits(ours(sample_on_device, logits, found["tokens"], temperature))
        alone = ours(sample_on_device, logits[77:78], found["tokens"][77:78], temperature)
        assert bits(alone) == bits(found["processed"][77:78].float())
