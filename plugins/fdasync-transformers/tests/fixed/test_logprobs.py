"""The trainer's log-probs: the bits of the sampler's, and gradients against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from fdasync_transformers.fixed import logprob_functions
from fdasync_transformers.fixed.logprob_functions import Rows, gradients_of_logits
from fdasync_transformers.fixed.logprobs import logprobs, logprobs_of_logits
from fdasync_transformers.sampling.token_logprobs import (
    logprobs_of,
    normalisers,
    normalisers_on_device,
    picked,
    token_logprobs,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from fdasync.errors import BadInput
from fdasync.gpu.kernels.sampling.gradients import logit_gradients
from fdasync.gpu.kernels.sampling.log_masses import LogMasses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS, WIDTH, VOCAB = 37, 24, 203


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.dtype is other.dtype is torch.float32
    return torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))


def made(dtype: torch.dtype, *, bias: bool = False) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    """Hidden states, a head and targets, of which two are left out."""
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, generator=random)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=bias)
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=random) * 0.6)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=random)
    targets[[3, 20]] = -100
    return hidden.to(DEVICE, dtype).requires_grad_(), head.to(DEVICE, dtype), targets.to(DEVICE)


def capped(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 5.0) * 5.0


def reference(
    hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor, temperature: float, finish: Any
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Log-probs and entropies in float64, and the leaves of their graph."""
    leaves = [part.detach().double().requires_grad_() for part in (hidden, *head.parameters())]
    logits = linear(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    logs = torch.log_softmax((finish(logits) if finish else logits) / temperature, -1)
    kept = targets >= 0
    values = logs.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * kept
    return values, -(logs.exp() * logs).sum(-1) * kept, leaves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_they_are_the_samplers(dtype: torch.dtype, temperature: float) -> None:
    hidden, head, targets = made(dtype, bias=True)
    logits = linear(hidden, head.weight, head.bias).detach()
    kept = targets >= 0
    wanted = token_logprobs(logits, targets, temperature=temperature)[kept]
    # one chunk: the product is the very same
    found = logprobs(hidden, head, targets, temperature=temperature)
    assert same_bits(found[kept], wanted)
    assert (found[~kept] == 0).all()
    assert same_bits(logprobs_of_logits(logits, targets, temperature=temperature)[kept], wanted)
    values, entropies = logprobs(hidden, head, targets, temperature=temperature, return_entropy=True)
    assert same_bits(values[kept], wanted)
    assert entropies.dtype is torch.float32
    exact = torch.distributions.Categorical(logits=logits.double() / (temperature or 1.0)).entropy()
    assert torch.allclose(entropies[kept].double(), exact[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("finish", [None, capped, lambda logits: logits.float() / 3.0])
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_float64(dtype: torch.dtype, chunk_tokens: int, finish: Any) -> None:
    hidden, head, targets = made(dtype, bias=True)
    random = torch.Generator().manual_seed(5)
    weights, others = torch.randn(2, TOKENS, generator=random).to(DEVICE)
    values, entropies = logprobs(
        hidden, head, targets, temperature=0.8, finish=finish, chunk_tokens=chunk_tokens, return_entropy=True
    )
    (values * weights + entropies * others * 0.3).sum().backward()
    exact, exact_entropies, leaves = reference(hidden, head, targets, 0.8, finish)
    (exact * weights + exact_entropies * others * 0.3).sum().backward()
    error = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for found, leaf in zip((hidden, *head.parameters()), leaves, strict=True):
        assert found.grad is not None
        assert leaf.grad is not None
        assert found.grad.dtype is dtype
        assert (found.grad - leaf.grad).norm() <= error * leaf.grad.norm()


def test_float32_gradients_are_as_good_as_the_librarys() -> None:
    hidden, head, targets = made(torch.bfloat16)
    exact, _, leaves = reference(hidden, head, targets, 1.0, None)
    exact.sum().backward()
    logprobs(hidden, head, targets, chunk_tokens=8).sum().backward()
    ours = [hidden.grad, head.weight.grad]
    hidden.grad = head.weight.grad = None
    logs = torch.log_softmax(linear(hidden, head.weight).float(), -1)
    (logs.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)).sum().backward()
    for mine, theirs, leaf in zip(ours, [hidden.grad, head.weight.grad], leaves, strict=True):
        assert mine is not None
        assert theirs is not None
        assert leaf.grad is not None
        assert (mine - leaf.grad).norm() <= 1.1 * (theirs - leaf.grad).norm() + 1e-12


def test_only_what_is_wanted_has_a_gradient() -> None:
    hidden, head, targets = made(torch.float32)
    logprobs(hidden.detach(), head, targets, chunk_tokens=8).sum().backward()
    assert head.weight.grad is not None
    head.weight.requires_grad_(False)
    values, entropies = logprobs(hidden, head.weight, targets, return_entropy=True)
    # of one result alone
    entropies.sum().backward()
    assert hidden.grad is not None
    assert values.requires_grad
    assert not logprobs(hidden.detach(), head, targets).requires_grad
    with torch.no_grad():
        assert not logprobs(hidden, head, targets).requires_grad


def test_chunks_and_shapes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a product whose rows have the same bits in every batch, as within `fixed_numerics`."""

    def by_row(x: torch.Tensor, weight: torch.Tensor, _bias: None) -> torch.Tensor:
        return torch.stack([(row * weight).sum(-1) for row in x])

    monkeypatch.setattr(logprob_functions, "linear", by_row)
    hidden, head, targets = made(torch.float32)
    found = logprobs(hidden, head, targets)
    for chunk_tokens in (1, 7, 36, 37):
        assert same_bits(logprobs(hidden, head, targets, chunk_tokens=chunk_tokens), found)
    shaped = logprobs(hidden[:36].view(2, 3, 6, WIDTH), head, targets[:36].view(2, 3, 6), chunk_tokens=4)
    assert shaped.shape == (2, 3, 6)
    assert same_bits(shaped.view(-1), found[:36])
    assert logprobs(hidden[:0], head, targets[:0]).shape == (0,)
    assert same_bits(logprobs(hidden[0], head, targets[0]), found[0])
    # padded vocabularies
    wide = torch.nn.Parameter(torch.cat([head.weight.detach(), torch.ones(5, WIDTH, device=DEVICE)]))
    short = logprobs(hidden, wide, targets, vocab_size=VOCAB)
    assert same_bits(short, found)
    short.sum().backward()
    assert wide.grad is not None
    assert not wide.grad[VOCAB:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_logits_are_scored_where_they_are(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    leaf = (torch.randn(3, 6, VOCAB, generator=random) * 3).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (3, 5), generator=random).to(DEVICE)
    targets[1, 2] = -1
    values, entropies = logprobs_of_logits(leaf[:, :-1], targets, temperature=0.9, return_entropy=True)
    flat = logprobs_of_logits(leaf.detach()[:, :-1].reshape(-1, VOCAB), targets.view(-1), temperature=0.9)
    assert same_bits(values.reshape(-1), flat)
    weights = torch.randn(2, 3, 5, generator=random).to(DEVICE)
    (values * weights[0] + entropies * weights[1]).sum().backward()
    other = leaf.detach().double().requires_grad_()
    logs = torch.log_softmax(other[:, :-1] / 0.9, -1)
    kept = targets >= 0
    exact = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * weights[0] * kept
    (exact - (logs.exp() * logs).sum(-1) * weights[1] * kept).sum().backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert leaf.grad.dtype is dtype
    error = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (leaf.grad - other.grad).abs().max() <= error * other.grad.abs().max()
    assert not leaf.grad[:, -1].any()


def test_impossible_tokens_have_gradients_too() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 2.0, 1e30, -1.0], [0.5, -torch.inf, 2.0, 3.0, -1.0]], device=DEVICE)
    leaf = logits.clone().requires_grad_()
    values, entropies = logprobs_of_logits(leaf, torch.tensor([0, 1], device=DEVICE), return_entropy=True)
    assert values.tolist() == [-1e30, -torch.inf] or values[1] == -torch.inf
    (values[1:].sum() + entropies.sum()).backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_gradients_is_the_hosts(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(9)
    logits = (torch.randn(3, 2050, generator=random) * 4).to(dtype)
    logits[1, 5:900] = -torch.inf
    targets, weights = torch.tensor([7, 2049, 0]), torch.randn(2, 3, generator=random)
    for entropy in (False, True):
        sums = normalisers(logits, temperature=0.7, entropy=entropy)
        host, into = torch.empty_like(logits), logits.clone().to(DEVICE)
        gradients_of_logits(logits, Rows(targets, sums, weights[0], weights[1] if entropy else None), host)
        masses = LogMasses(*(None if part is None else part.to(DEVICE) for part in sums[:3]))  # type: ignore[arg-type]
        # over the logits
        sent = [part.to(DEVICE) for part in (targets, *weights)]
        logit_gradients(into, sent[0], sums.scale, masses, sent[1], sent[2] if entropy else None, into)
        error = 2**-7 if dtype is torch.bfloat16 else 1e-5
        assert torch.allclose(host.float(), into.cpu().float(), rtol=error, atol=1e-8)


def test_what_does_not_go_together_is_refused() -> None:
    hidden, head, targets = made(torch.float32)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: logprobs(hidden, head, targets[:-1]), "targets"),
        (lambda: logprobs(hidden[:, :-1], head, targets), "hidden"),
        (lambda: logprobs(hidden.bfloat16(), head, targets), "hidden"),
        (lambda: logprobs(hidden, head, targets, temperature=-1.0), "temperature"),
        (lambda: logprobs(hidden, head, targets, temperature=float("nan")), "temperature"),
        (lambda: logprobs(hidden, head, targets, chunk_tokens=0), "chunk_tokens"),
        (lambda: logprobs_of_logits(hidden, targets[:-1]), "logits"),
        (lambda: logprobs_of_logits(hidden.double(), targets), "logits"),
    ]
    for call, field in cases:
        with pytest.raises(BadInput) as caught:
            call()
        assert caught.value.field == field
    assert "forward" not in head.__dict__
    # nothing of the vocabulary
    found = logprobs(hidden, head, torch.full_like(targets, VOCAB))
    assert torch.isnan(found).all()


def test_autocast_changes_nothing_and_hooks_run() -> None:
    hidden, head, targets = made(torch.float32)
    plain = logprobs(hidden, head, targets)
    seen: list[int] = []
    head.register_forward_pre_hook(lambda *_: seen.append(0))
    head.register_forward_hook(lambda *_: seen.append(1))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = logprobs(hidden, head, targets)
        found.sum().backward()
    assert same_bits(found, plain)
    assert seen == [0, 1]
    mine = head.weight.grad
    head.weight.grad = None
    plain.sum().backward()
    assert mine is not None
    assert head.weight.grad is not None
    assert torch.equal(mine, head.weight.grad)


def test_fsdp_gathers_the_heads_weight(tmp_path: Path) -> None:
    """One process; the head is wrapped on its own, its masters are float32."""
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        _, head, targets = made(torch.float32)
        hidden, narrow, _ = made(torch.bfloat16)
        wanted = logprobs(hidden, narrow, targets, chunk_tokens=8)
        wanted.sum().backward()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded = fully_shard(head, mp_policy=policy, reshard_after_forward=True)
        with pytest.raises(BadInput, match="sharded"):
            logprobs(hidden, sharded.weight, targets)
        found = logprobs(hidden, sharded, targets, chunk_tokens=8)
        found.sum().backward()
        assert same_bits(found, wanted)
        assert isinstance(sharded.weight, DTensor)
        assert isinstance(sharded.weight.grad, DTensor)
        assert narrow.weight.grad is not None
        assert torch.equal(sharded.weight.grad.full_tensor(), narrow.weight.grad.float())
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary_needs_no_table_in_float32(dtype: torch.dtype) -> None:
    random = torch.Generator(DEVICE).manual_seed(1)
    tokens, width, vocab, chunk = 2048, 256, 151_936, 256
    hidden = torch.randn(tokens, width, device=DEVICE, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=DEVICE, generator=random) * 0.1).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE, generator=random)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=chunk)
    values.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2.5 * chunk * vocab * dtype.itemsize
    for rows in (slice(0, 256), slice(512, 768)):
        logits = linear(hidden.detach()[rows], weight)
        sums = normalisers_on_device(logits, temperature=0.7)
        assert same_bits(values[rows], logprobs_of(picked(logits, targets[rows]), sums))
