"""Log-probs of tokens for trainers, with the rollout's bits and a backward pass that keeps no table of logits.

`logprobs` takes hidden states and the head: it makes the logits of a chunk of tokens, scores them as the sampler does
(`sampling/token_logprobs.py`), drops them, and makes them again in the backward pass. `logprobs_of_logits` takes logits
that exist. On a GPU neither makes a float32 table of them. The bits are the rollout's where the hidden states or logits
have the rollout's bits: from a pass within `fixed_numerics`, in the rollout's dtype. The head's product always has the
order of fixed numerics, here and in the backward pass, also where that context is closed: these functions are for such
a rollout's bits. For a rollout with default numerics, give `logprobs_of_logits` the logits of the model's own head.
Knows no models and no batches. Called by trainers.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, overload

import torch

from fdasync.errors import BadInput
from fdasync_trainer.numerics.logprob_functions import How, OfHidden, OfLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Scored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    Finish = Callable[[torch.Tensor], torch.Tensor]

#: tokens whose logits exist at a time: 0.3 GB in bfloat16 for 152k ids
CHUNK_TOKENS = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@overload
def logprobs(
    hidden: torch.Tensor, head: torch.nn.Module | torch.Tensor, targets: torch.Tensor, *, temperature: float = ...,
    finish: Finish | None = ..., vocab_size: int | None = ..., chunk_tokens: int = ...,
    return_entropy: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def logprobs(
    hidden: torch.Tensor, head: torch.nn.Module | torch.Tensor, targets: torch.Tensor, *, temperature: float = ...,
    finish: Finish | None = ..., vocab_size: int | None = ..., chunk_tokens: int = ..., return_entropy: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def logprobs(
    hidden: torch.Tensor, head: torch.nn.Module | torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0,
    finish: Finish | None = None, vocab_size: int | None = None, chunk_tokens: int = CHUNK_TOKENS,
    return_entropy: bool = False,
) -> Scored:  # fmt: skip
    """The log-prob of each target under the softmax of its token's logits over the temperature.

    At temperature 1 it is the rollout's raw log-prob; at another one its processed log-prob of requests that filter,
    penalise and constrain nothing. On a GPU it queues work on the current stream and returns.

    Args:
        hidden: [..., H], behind the model's last norm, of the tokens before the targets.
        head: the output layer, a module with a `weight` [V, H] and perhaps a `bias` [V], or such a weight. A module is
            called with a forward of ours, so that its hooks run: FSDP2 gathers weights there, where the head is wrapped
            on its own. Of the dtype of `hidden`; autocast is switched off inside.
        targets: int64 [...]. Those below 0 are left out: 0 and no gradient.
        temperature: 0: as 1, which is what the rollout reports of greedy requests.
        finish: what the model does to logits behind the head (a scale, a soft cap): a pure function, element by
            element, without parameters. Called within fixed numerics, in the backward pass again.
        vocab_size: logits from it on belong to no token; None: there are none.
        chunk_tokens: tokens whose logits exist at a time.
        return_entropy: also give the entropy of the softmax in nats, with its own gradient, made in the same pass.
            Its last bits differ between devices.

    Returns:
        float32 [...], NaN where a row of logits has NaN or +inf or a target is past the vocabulary; and the entropies,
        float32 [...]. The gradient of the weight is summed over chunks in float32, for which the backward pass holds
        a table of the weight's size. There is no second derivative.

    Raises:
        BadInput: shapes, dtypes or devices that do not go together; no vocabulary; a head whose weight is sharded while
            it is called, or that has parts, such as adapters.
        RunnerError: `finish` has an operation without a fixed form.
    """
    if chunk_tokens < 1:
        raise BadInput("chunk_tokens", str(chunk_tokens), limit=1)
    how = How(_checked(temperature), return_entropy, finish, chunk_tokens)
    if isinstance(head, torch.Tensor):
        return _shaped(_scored(hidden, head, None, targets, vocab_size, how), targets)

    parts = [name for name, _ in head.named_children()]
    if parts:
        problem = f"{type(head).__name__} has parts ({', '.join(parts)}), and only its weight and bias would be used"
        raise BadInput("head", problem, hint="merge adapters into it, or give logprobs_of_logits the model's logits")

    def forward(given: torch.Tensor) -> Scored:
        weight = head.weight
        assert isinstance(weight, torch.Tensor)
        return _scored(given, weight, getattr(head, "bias", None), targets, vocab_size, how)

    with _other_forward(head, forward):
        found: Scored = head(hidden)
    return _shaped(found, targets)


@overload
def logprobs_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = ..., return_entropy: Literal[False] = ...
) -> torch.Tensor: ...


@overload
def logprobs_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = ..., return_entropy: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def logprobs_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, return_entropy: bool = False
) -> Scored:
    """`logprobs` of logits that exist, [..., V] bfloat16, float16 or float32, for targets int64 [...].

    Give them as the model made them, not divided by the temperature. They are kept for the backward pass, which makes
    one more tensor like them. A slice like `logits[:, :-1]` is not copied.

    Raises:
        BadInput: shapes, dtypes or devices that do not go together; no vocabulary.
    """
    _check_dtype(logits, "logits")
    if not logits.dim() or logits.shape[:-1] != targets.shape or not logits.shape[-1]:
        raise BadInput("logits", f"{tuple(logits.shape)} for targets {tuple(targets.shape)}")
    _check_targets(targets, logits)
    how = How(_checked(temperature), return_entropy)
    with torch.cuda.device_of(logits):
        found: Scored = OfLogits.apply(logits, targets, how)  # type: ignore[no-untyped-call]  # torch has no types here
    return found


def _checked(temperature: float) -> float:
    if not 0.0 <= temperature < math.inf:
        raise BadInput("temperature", str(temperature), hint="0 and above")
    return float(temperature)


def _check_dtype(tensor: torch.Tensor, field: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise BadInput(field, f"is {tensor.dtype}", limit="bfloat16, float16 or float32")


def _check_targets(targets: torch.Tensor, beside: torch.Tensor) -> None:
    if targets.dtype is not torch.int64 or targets.device != beside.device:
        raise BadInput("targets", f"{targets.dtype} on {targets.device}", limit=f"int64 on {beside.device}")


@contextmanager
def _other_forward(module: torch.nn.Module, forward: Callable[[torch.Tensor], Scored]) -> Iterator[None]:
    """The module with another forward, and with its hooks."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _scored(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
    vocab_size: int | None, how: How,
) -> Scored:  # fmt: skip
    if hasattr(weight, "full_tensor"):
        hint = "wrap the output layer on its own, or call within the forward pass of the module that gathers it"
        raise BadInput("head", "its weight is sharded", hint=hint)
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise BadInput("hidden", f"{tuple(hidden.shape)} for a head of {tuple(weight.shape)}")
    if not weight.numel():
        raise BadInput("head", f"a weight {tuple(weight.shape)} has no entries")
    _check_dtype(hidden, "hidden")
    if hidden.dtype is not weight.dtype or hidden.device != weight.device:
        hint = "round masters to the rollout's dtype before the forward pass"
        mine, its = f"{hidden.dtype} on {hidden.device}", f"{weight.dtype} on {weight.device}"
        raise BadInput("hidden", f"{mine} for a head of {its}", hint=hint)
    if targets.shape != hidden.shape[:-1]:
        raise BadInput("targets", f"{tuple(targets.shape)} for hidden states {tuple(hidden.shape)}")
    _check_targets(targets, hidden)
    if vocab_size is not None and vocab_size < 1:
        raise BadInput("vocab_size", str(vocab_size), limit=1)
    if vocab_size is not None and vocab_size < weight.shape[0]:
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    # columns that are contiguous instead of rows would change the bits of a product
    rows, ids = hidden.reshape(-1, hidden.shape[-1]).contiguous(), targets.reshape(-1)
    # kernels are launched on the current device
    with torch.cuda.device_of(rows):
        # torch has no types here
        found: Scored = OfHidden.apply(rows, weight, bias, ids, how)  # type: ignore[no-untyped-call]
    return found


def _shaped(found: Scored, like: torch.Tensor) -> Scored:
    """Results of flattened tokens. Not a module's to return: its hooks warn of views."""
    if isinstance(found, tuple):
        return found[0].view(like.shape), found[1].view(like.shape)
    return found.view(like.shape)
