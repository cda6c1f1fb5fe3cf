"""The log-prob of a token given a row of logits: one definition for samplers, scores of prompts and trainers.

It is (logit - largest) / temperature - log(sum), in float64 and in this order, rounded to float32 at the end. The sum
is of whole-number masses (`host_rows.py`, and on GPUs `fdasync_kernels.sampling`), so its bits depend on the row alone:
not on other rows, not on filters, not on the kernel that made it. Everything here besides the sum is single operations
of torch; each rounds once on every device. Knows no requests and no models. Called by `scoring.py` and by
`fdasync_trainer/numerics/logprobs.py`; pure, no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fdasync_transformers.sampling import host_rows
from fdasync_transformers.sampling.math import numbers_of
from fdasync_transformers.sampling.plan import scale_of

if TYPE_CHECKING:
    from fdasync_kernels.sampling.log_masses import LogMasses


class Normalisers(NamedTuple):
    """The sums of n rows of logits; tensors on their device.

    Attributes:
        best: float32 [n], the largest logit.
        log_mass: float64 [n], the log of the sum of exp((logit - best) * scale); NaN where a row has NaN or +inf, or
            nothing finite.
        entropy: float64 [n], in nats; None: not asked for.
        scale: one over the temperature.
    """

    best: torch.Tensor
    log_mass: torch.Tensor
    entropy: torch.Tensor | None
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are not None."""
        return (self.best, self.log_mass) if self.entropy is None else (self.best, self.log_mass, self.entropy)


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """float32 [n]: the log-prob of each target, with the bits that the sampler reports: at temperature 1 its raw ones,
    at another its processed ones of requests without filters, penalties, bias and grammar. No gradient.

    On a GPU it queues work on the current stream and returns. NaN where a row has NaN or +inf, or nothing finite, and
    where a target is outside the vocabulary.

    Args:
        logits: [n, V] bfloat16, float16 or float32; read.
        targets: int64 [n], on the same device.
        temperature: 0: as 1, which is what the sampler reports of greedy requests.
    """
    return logprobs_of(picked(logits, targets), normalisers(logits, temperature=temperature))


def normalisers(logits: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False) -> Normalisers:
    """The sums of rows; arguments as `token_logprobs` has them."""
    if logits.is_cuda:
        return normalisers_on_device(logits, temperature=temperature, entropy=entropy)
    scale = scale_of(temperature or 1.0)
    rows = [host_rows.log_mass_of_row(numbers_of(row), scale, entropy=entropy) for row in logits]
    best, log_mass, entropies = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).t().contiguous()
    return Normalisers(best.float(), log_mass, entropies if entropy else None, scale)


def normalisers_on_device(logits: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False) -> Normalisers:
    """The sums of rows, by the kernels."""
    # not above: machines without a GPU need no Triton
    from fdasync_kernels.sampling.log_masses import log_masses

    scale = scale_of(temperature or 1.0)
    found: LogMasses = log_masses(logits, scale, entropy=entropy)
    return Normalisers(found.best, found.log_mass, found.entropy, scale)


def picked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float32 [n]: the logit of each target; NaN where it is outside the vocabulary."""
    width = logits.shape[-1]
    values = logits.gather(-1, targets.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1).float()
    return values.masked_fill((targets < 0) | (targets >= width), float("nan"))


def logprobs_of(values: torch.Tensor, sums: Normalisers) -> torch.Tensor:
    """float32 log-probs of single logits, [n] or [n, k], of the rows of these sums."""
    shape = (-1,) + (1,) * (values.dim() - 1)
    logs = (values.double() - sums.best.double().view(shape)) * sums.scale
    return (logs - sums.log_mass.view(shape)).float()
