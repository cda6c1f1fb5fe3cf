"""The trainer's log-probs: the bits of the sampler's, and gradients against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from fdasync_kernels.sampling.gradients import logit_gradients
from fdasync_kernels.sampling.log_masses import LogMasses
from fdasync_trainer.numerics.logprob_functions import Rows, gradients_of_logits
from fdasync_trainer.numerics.logprobs import logprobs, logprobs_of_logits
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.sampling.token_logprobs import (
    logprobs_of,
    normalisers,
    normalisers_on_device,
    picked,
    token_logprobs,
)
from logprob_cases import CUDA, DEVICE, DTYPES, bits
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOKENS, WIDTH, VOCAB = 37, 24, 203
# of gradients, over their size
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def in_order(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The head's product as a rollout computes it."""
    with torch.no_grad(), FixedNumerics():
        return linear(hidden, weight, bias)


def made(
    dtype: torch.dtype, *, bias: bool = False, width: int = WIDTH
) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    """Hidden states, a head and targets, of which two are left out."""
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, width, generator=random)
    head = torch.nn.Linear(width, VOCAB, bias=bias)
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
    logits = in_order(hidden, head.weight, head.bias)
    kept = targets >= 0
    wanted = token_logprobs(logits, targets, temperature=temperature)[kept]
    found = logprobs(hidden, head, targets, temperature=temperature)
    assert bits(found[kept]) == bits(wanted)
    assert (found[~kept] == 0).all()
    assert bits(logprobs_of_logits(logits, targets, temperature=temperature)[kept]) == bits(wanted)
    values, entropies = logprobs(hidden, head, targets, temperature=temperature, return_entropy=True)
    assert bits(values[kept]) == bits(wanted)
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
    for found, leaf in zip((hidden, *head.parameters()), leaves, strict=True):
        assert found.grad is not None
        assert leaf.grad is not None
        assert found.grad.dtype is dtype
        assert (found.grad - leaf.grad).norm() <= ERROR[dtype] * leaf.grad.norm()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_no_bit_and_gradients_by_roundings_alone(dtype: torch.dtype) -> None:
    hidden, head, targets = made(dtype, bias=True, width=384)
    kept = targets >= 0
    wanted = token_logprobs(in_order(hidden, head.weight, head.bias), targets)[kept]
    values, entropies, leaves = reference(hidden, head, targets, 1.0, None)
    (values + 0.3 * entropies).sum().backward()
    first: list[torch.Tensor] = []
    for chunk_tokens in (1, 2, 15, 17, 36, 37, 1024):
        hidden.grad = None
        head.zero_grad()
        found = logprobs(hidden, head, targets, chunk_tokens=chunk_tokens, return_entropy=True)
        (found[0] + 0.3 * found[1]).sum().backward()
        assert hidden.grad is not None
        first = first or [found[1], hidden.grad]
        assert bits(found[0][kept]) == bits(wanted), chunk_tokens
        assert bits(found[1]) == bits(first[0]), chunk_tokens
        # gradients of logits are the same: what a row's other shapes of a product round
        apart = (hidden.grad - first[1]).norm(dim=1)
        assert (apart <= torch.finfo(dtype).eps * 4 * first[1].norm(dim=1)).all(), chunk_tokens
        for tensor, leaf in zip((hidden, *head.parameters()), leaves, strict=True):
            assert tensor.grad is not None
            assert leaf.grad is not None
            assert (tensor.grad - leaf.grad).norm() <= ERROR[dtype] * leaf.grad.norm(), chunk_tokens


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("chunk_tokens", [1, 2, 15, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_made_again_are_the_same(dtype: torch.dtype, chunk_tokens: int) -> None:
    """By the backward pass, and by checkpointing of the caller's."""
    hidden, head, targets = made(dtype, width=384)
    seen: list[torch.Tensor] = []

    def finish(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.detach().clone())
        return capped(logits)

    def run(given: torch.Tensor) -> torch.Tensor:
        return logprobs(given, head, targets, finish=finish, chunk_tokens=chunk_tokens)

    wanted = in_order(hidden, head.weight)
    for call in (run, lambda given: checkpoint(run, given, use_reentrant=False)):
        seen.clear()
        call(hidden).sum().backward()
        passes = torch.cat(seen).view(-1, *wanted.shape)
        assert len(passes) == (2 if call is run else 3)
        for made_again in passes:
            assert torch.equal(made_again, wanted)


def test_what_stands_behind_the_head_has_the_rollouts_bits() -> None:
    """A sigmoid is one of the functions whose bits depend on an element's place in its tensor."""
    hidden, head, targets = made(torch.float32)
    seen: list[torch.Tensor] = []

    def finish(logits: torch.Tensor) -> torch.Tensor:
        table = logits.sigmoid()
        seen.append(table.detach().clone())
        return table

    with FixedNumerics():
        wanted = in_order(hidden, head.weight).sigmoid()
    for chunk_tokens in (1, 2, 15):
        seen.clear()
        logprobs(hidden, head, targets, finish=finish, chunk_tokens=chunk_tokens).sum().backward()
        for made_again in torch.cat(seen).view(2, *wanted.shape):
            assert torch.equal(made_again, wanted), chunk_tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(dtype: torch.dtype) -> None:
    hidden, head, targets = made(dtype)
    wanted, seen = in_order(hidden, head.weight), []

    def finish(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits

    # contiguous along tokens, and rows of a wider table
    for strided in (hidden.t().contiguous().t(), torch.cat([hidden, hidden], 1)[:, :WIDTH]):
        for chunk_tokens in (16, 1024):
            seen.clear()
            logprobs(strided, head, targets, finish=finish, chunk_tokens=chunk_tokens)
            assert torch.equal(torch.cat(seen), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_change_no_bit(dtype: torch.dtype) -> None:
    hidden, head, targets = made(dtype, width=384)
    found = logprobs(hidden, head, targets)
    shaped = logprobs(hidden[:36].view(2, 3, 6, 384), head, targets[:36].view(2, 3, 6), chunk_tokens=4)
    assert shaped.shape == (2, 3, 6)
    assert bits(shaped.view(-1)) == bits(found[:36])
    assert logprobs(hidden[:0], head, targets[:0]).shape == (0,)
    assert bits(logprobs(hidden[0], head, targets[0])) == bits(found[0])
    # padded vocabularies
    wide = torch.nn.Parameter(torch.cat([head.weight.detach(), torch.ones(5, 384, dtype=dtype, device=DEVICE)]))
    short = logprobs(hidden, wide, targets, vocab_size=VOCAB)
    assert bits(short) == bits(found)
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
    assert bits(values.reshape(-1)) == bits(flat)
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
        (lambda: logprobs(hidden.double(), head.weight.double(), targets), "hidden"),
        (lambda: logprobs(hidden.to("meta"), head, targets), "hidden"),
        (lambda: logprobs(hidden, head, targets.float()), "targets"),
        (lambda: logprobs(hidden, head, targets.int()), "targets"),
        (lambda: logprobs(hidden, head, targets.to("meta")), "targets"),
        (lambda: logprobs(hidden, head, targets, vocab_size=0), "vocab_size"),
        (lambda: logprobs(hidden, head.weight[:0], targets), "head"),
        (lambda: logprobs(hidden[:, :0], head.weight[:, :0], targets), "head"),
        (lambda: logprobs(hidden, head, targets, temperature=-1.0), "temperature"),
        (lambda: logprobs(hidden, head, targets, temperature=float("nan")), "temperature"),
        (lambda: logprobs(hidden, head, targets, chunk_tokens=0), "chunk_tokens"),
        (lambda: logprobs_of_logits(hidden, targets[:-1]), "logits"),
        (lambda: logprobs_of_logits(hidden.double(), targets), "logits"),
        (lambda: logprobs_of_logits(hidden[:, :0], targets), "logits"),
        (lambda: logprobs_of_logits(hidden, targets.float()), "targets"),
        (lambda: logprobs_of_logits(hidden, targets.to("meta")), "targets"),
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
    assert bits(found) == bits(plain)
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
        assert bits(found) == bits(wanted)
        assert isinstance(sharded.weight, DTensor)
        assert isinstance(sharded.weight.grad, DTensor)
        assert narrow.weight.grad is not None
        assert torch.equal(sharded.weight.grad.full_tensor(), narrow.weight.grad.float())
    finally:
        dist.destroy_process_group()


def test_a_head_with_adapters_is_refused() -> None:
    # as a LoRA layer is: a module around the head, which shows the head's own weight
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(8, 20)
            self.lora_a = torch.nn.Linear(8, 2)

        @property
        def weight(self) -> torch.Tensor:
            return self.base_layer.weight

    with pytest.raises(BadInput, match=r"Adapted has parts \(base_layer, lora_a\)"):
        logprobs(torch.randn(3, 8), Adapted(), torch.zeros(3, dtype=torch.int64))


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
        logits = in_order(hidden[rows], weight)
        sums = normalisers_on_device(logits, temperature=0.7)
        assert bits(values[rows]) == bits(logprobs_of(picked(logits, targets[rows]), sums))
