"""What a family does to logits behind its output layer (a scale, a soft cap), by the library's own code.

The model's own forward is run with stand-ins for the decoder and for the output layer; the latter answers with the
given logits. So no family is named here, and each operation is the same as in the rollout. Knows nothing of log-probs.
Called by trainers, for `logprobs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import BadInput
from fdasync_transformers.model.head import decoder_of

if TYPE_CHECKING:
    from collections.abc import Callable

# of the logits by which it is found whether anything is done: soft caps and clamps change some of them
_PROBE = (-300.0, 300.0)


class _Hidden:
    """What a decoder returns: hidden states, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]


class _StandIn(torch.nn.Module):
    """A module that answers with one value, whatever it is asked. `weight` has the dtype that callers look at."""

    def __init__(self, answer: Any, like: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.weight = like.new_empty(0)

    def forward(self, *_args: Any, **_others: Any) -> Any:
        return self.answer


def finish_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The `finish` of `logprobs` for a model of the library: takes and gives logits [n, V]. None: nothing is done.

    The model is not changed, and none of its hooks runs. It is asked anew at each call, so it may be trained on.

    Raises:
        BadInput: the model's forward cannot be run so: its decoder or its output layer is not one of its own modules.
    """
    names = {id(module): name for name, module in model.named_children()}
    head, decoder = model.get_output_embeddings(), decoder_of(model)
    if head is None or id(head) not in names or id(decoder) not in names:
        raise BadInput("model", f"{type(model).__name__} has no decoder and output layer side by side")
    of_head, of_decoder = names[id(head)], names[id(decoder)]

    def finish(logits: torch.Tensor) -> torch.Tensor:
        # the model itself stays as it is, also where a backward pass runs on another thread
        shell = object.__new__(type(model))
        modules = dict(model._modules)
        modules[of_head] = _StandIn(logits[None], logits)
        modules[of_decoder] = _StandIn(_Hidden(logits.new_zeros((1, len(logits), 1))), logits)
        shell.__dict__.update(model.__dict__, _modules=modules)
        # a forward that a context has put on the model runs the model, and not the shell
        shell.__dict__.pop("forward", None)
        ids = torch.zeros((1, len(logits)), dtype=torch.int64, device=logits.device)
        found: torch.Tensor = shell.forward(input_ids=ids, use_cache=False).logits[0]
        return found

    weight: Any = head.weight
    probe = torch.linspace(*_PROBE, weight.shape[0], dtype=torch.float32, device=weight.device).to(weight.dtype)[None]
    with torch.no_grad():
        return None if torch.equal(finish(probe).float(), probe.float()) else finish
