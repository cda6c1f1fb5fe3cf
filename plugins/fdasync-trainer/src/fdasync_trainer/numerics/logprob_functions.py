"""The autograd functions behind `logprobs.py`: forward by the sampler's definition, backward by a recomputed softmax.

Both keep two numbers of each row (the largest logit and the log of the sum) and make the softmax of them again, on a
GPU in one kernel without a float32 table. `OfHidden` enters `FixedNumerics` for the head's product and what stands
behind it, forward and backward, on every thread that runs it: its logits are the same both times, and the rollout's.
Products of gradients are the library's. Knows no heads beyond a weight, a bias and a function behind them. Called by
`logprobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.sampling.token_logprobs import Normalisers, logprobs_of, normalisers, picked
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Scored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# rows whose softmax a CPU holds at a time
_HOST_ROWS = 32


class Rows(NamedTuple):
    """What n rows of logits need: targets int64 [n], sums, and the factors of gradients of log-probs and entropies,
    float32 [n]; None: entropies have no gradient."""

    targets: torch.Tensor
    sums: Normalisers
    weights: torch.Tensor
    entropy_weights: torch.Tensor | None

    def part(self, rows: slice) -> Rows:
        return Rows(self.targets[rows], _some(self.sums, rows), self.weights[rows], _at(self.entropy_weights, rows))


@dataclass(frozen=True)
class How:
    """What is wanted; `logprobs` says what each is."""

    temperature: float = 1.0
    entropy: bool = False
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    chunk_tokens: int = 1


class OfLogits(torch.autograd.Function):
    """Log-probs, float32 [...], from logits [..., V] and targets int64 [...]; with `How.entropy` entropies, too."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, how: How) -> Scored:
        parts = [_score(table, of, how) for table, of in _tables(logits, targets)]
        values = torch.cat([values for values, _ in parts]).view(targets.shape)
        return _finished(ctx, how, values, [sums for _, sums in parts], logits, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (logits,), rows = _kept(ctx, gradients)
        into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        at = 0
        for table, part in _tables(logits, into):
            gradients_of_logits(table, rows.part(slice(at, at + len(table))), part)
            at += len(table)
        return into, None, None


class OfHidden(torch.autograd.Function):
    """Log-probs as of `OfLogits`, float32 [T], from hidden states [T, H] with contiguous rows, a weight [V, H], a bias
    [V] or None and targets int64 [T]. Logits exist for `How.chunk_tokens` at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, how: How
    ) -> Scored:
        values = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        parts = []
        with _no_autocast(hidden):
            for rows in _chunks(hidden, how):
                logits = _head(hidden[rows], weight, bias)
                values[rows], sums = _score(_behind(logits, how), targets[rows], how)
                parts.append(sums)
        return _finished(ctx, how, values, parts, hidden, weight, bias, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (hidden, weight, bias), kept = _kept(ctx, gradients)
        how: How = ctx.how
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = _Sum(weight) if ctx.needs_input_grad[1] else None
        of_bias = _Sum(bias) if bias is not None and ctx.needs_input_grad[2] else None
        with _no_autocast(hidden):
            for rows in _chunks(hidden, how):
                gradient = _of_head(_head(hidden[rows], weight, bias), how, kept.part(rows))
                if of_hidden is not None:
                    of_hidden[rows] = gradient @ weight
                if of_weight is not None:
                    of_weight.add(gradient.t() @ hidden[rows])
                if of_bias is not None:
                    of_bias.add(gradient.sum(dim=0, dtype=torch.float32))
        return of_hidden, _result(of_weight), _result(of_bias), None, None


class _Sum:
    """A sum over chunks, in float32."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._sum: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        if self._sum is None:
            self._sum = part
        else:
            # one chunk needs no table in float32
            self._sum = self._sum.float().add_(part)

    def result(self) -> torch.Tensor:
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


def _result(total: _Sum | None) -> torch.Tensor | None:
    return None if total is None else total.result()


def gradients_of_logits(logits: torch.Tensor, rows: Rows, into: torch.Tensor) -> None:
    """Write the gradient with respect to logits [n, V] into a table of any float dtype, which may be the logits."""
    targets, sums, weights, entropy_weights = rows
    if logits.is_cuda:
        from fdasync_kernels.sampling.gradients import logit_gradients
        from fdasync_kernels.sampling.log_masses import LogMasses

        masses = LogMasses(sums.best, sums.log_mass, sums.entropy)
        logit_gradients(logits, targets, sums.scale, masses, weights, entropy_weights, into)
        return
    for first in range(0, len(targets), _HOST_ROWS):
        few = slice(first, first + _HOST_ROWS)
        some, weight, at = _some(sums, few), weights[few, None], targets[few, None].clamp(0, logits.shape[1] - 1)
        logs = logprobs_of(logits[few], some)
        p = logs.exp()
        gradient = p * -weight
        gradient.scatter_(1, at, gradient.gather(1, at) + weight)
        if entropy_weights is not None and some.entropy is not None:
            share = p * (logs + some.entropy[:, None].float()) * entropy_weights[few, None]
            gradient -= share.masked_fill_(p == 0.0, 0.0)
        into[few] = gradient.mul_(sums.scale)


def _head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the head makes of rows, in the rollout's order of sums."""
    with FixedNumerics():
        return linear(hidden, weight, bias)


def _behind(logits: torch.Tensor, how: How) -> torch.Tensor:
    """The logits after what the model does to its head's logits."""
    if how.finish is None:
        return logits
    with FixedNumerics():
        return how.finish(logits)


def _of_head(logits: torch.Tensor, how: How, rows: Rows) -> torch.Tensor:
    """The gradient with respect to what the head made; the logits are overwritten where nothing stands behind it."""
    if how.finish is None:
        gradients_of_logits(logits, rows, logits)
        return logits
    with torch.enable_grad():
        logits.requires_grad_()
        table = _behind(logits, how)
    into = torch.empty_like(table)
    gradients_of_logits(table.detach(), rows, into)
    (gradient,) = torch.autograd.grad(table, logits, into)
    return gradient


def _score(logits: torch.Tensor, targets: torch.Tensor, how: How) -> tuple[torch.Tensor, Normalisers]:
    """Log-probs of rows [n, V], 0 where tokens are left out, and the sums of these rows."""
    sums = normalisers(logits, temperature=how.temperature, entropy=how.entropy)
    return logprobs_of(picked(logits, targets), sums).masked_fill_(targets < 0, 0.0), sums


def _finished(
    ctx: Any, how: How, values: torch.Tensor, parts: list[Normalisers], *inputs: torch.Tensor | None
) -> Scored:
    """Keep what the backward pass needs, the targets last of the inputs, and return the results."""
    targets = inputs[-1]
    assert targets is not None
    none = normalisers(values.new_empty((0, 1)), temperature=how.temperature, entropy=how.entropy)
    # a first part for sums of no rows
    columns = [torch.cat(column) for column in zip(*(part.tensors for part in (none, *parts)), strict=True)]
    ctx.how, ctx.scale = how, none.scale
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *columns)
    if not how.entropy:
        return values
    return values, columns[2].float().view(targets.shape).masked_fill_(targets < 0, 0.0)


def _kept(ctx: Any, gradients: tuple[torch.Tensor | None, ...]) -> tuple[list[Any], Rows]:
    """The inputs before the targets, and what all rows have."""
    saved = list(ctx.saved_tensors)
    entropy = saved.pop() if ctx.how.entropy else None
    log_mass, best = saved.pop(), saved.pop()
    targets = saved.pop().reshape(-1)
    out = targets < 0

    def weights(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.reshape(-1).float().masked_fill(out, 0.0)

    first, *others = gradients
    of_values = torch.zeros_like(best) if first is None else weights(first)
    of_entropies = weights(others[0]) if others and others[0] is not None else None
    return saved, Rows(targets, Normalisers(best, log_mass, entropy, ctx.scale), of_values, of_entropies)


def _tables(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The rows of logits [..., V], in order, as tables [n, V], and of tensors beside them [n] or [n, V]; logits are
    not copied where their rows are not strided."""
    width = logits.shape[-1]
    if logits.stride(-1) != 1 and width > 1:
        logits = logits.contiguous()
    if logits.dim() <= 2 or logits.is_contiguous():
        yield logits.reshape(-1, width), *(_flat(other, logits.dim()) for other in others)
        return
    for parts in zip(logits, *others, strict=True):
        yield from _tables(*parts)


def _flat(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() == dims else tensor.reshape(-1)


def _chunks(hidden: torch.Tensor, how: How) -> Iterator[slice]:
    for first in range(0, len(hidden), how.chunk_tokens):
        yield slice(first, first + how.chunk_tokens)


def _some(sums: Normalisers, rows: slice) -> Normalisers:
    return Normalisers(sums.best[rows], sums.log_mass[rows], _at(sums.entropy, rows), sums.scale)


def _at(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
