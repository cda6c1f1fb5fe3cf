"""Computes logits of any rows of a step after its forward pass, a few rows at a time.

A step computes only the logits that it samples from: the logits of all tokens of a prompt would not fit into memory.
`Head` keeps the last hidden states of a pass, and runs the rest of the model over some of their rows. The rest is the
library's own code behind the decoder (head, scaling, soft caps), so each family's logits are its own. Knows no steps
and no sampling. Called by the step models, and by the parts of steps that score prompts and draft.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The part of the model that returns hidden states; None: it is not apart from the rest."""
    if model.base_model is not model:
        return model.base_model
    # one family's prefix names no attribute
    found = getattr(model, "model", None)
    return found if isinstance(found, torch.nn.Module) else None


class Head:
    """See the module. One for each model; used only where `decoder_of` finds a decoder."""

    def __init__(self, model: PreTrainedModel, inference: Callable[[], AbstractContextManager[None]]) -> None:
        """`inference`: what the model's code runs within."""
        self._model = model
        self._inference = inference
        self._decoder = decoder_of(model)
        self._kept: Any = None
        self._depth = 0
        # what the decoder returns, of no tokens; known from its first pass on
        self._form: Any = None
        if self._decoder is not None:
            first = self._decoder.register_forward_hook(self._note_form)
            self._forget = first.remove

    @property
    def hidden(self) -> torch.Tensor:
        """The last hidden states [tokens, hidden size] of the pass, in the model's dtype; inside `keeping` alone."""
        if self._kept is None:
            raise InvariantBroken("hidden states of a pass that was not kept")
        states: torch.Tensor = self._kept.last_hidden_state[0]
        return states

    def _note_form(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        states = output.last_hidden_state
        self._form = replace(output, last_hidden_state=states.new_empty((1, 0, states.shape[-1])))
        self._forget()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what the decoder returns in the forward pass inside, until the end of the (outermost) block."""

        def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._kept = output

        if self._decoder is None:
            raise InvariantBroken("the model has no decoder apart from its head")
        hook = self._decoder.register_forward_hook(keep)
        self._depth += 1
        try:
            yield
        finally:
            hook.remove()
            self._depth -= 1
            if not self._depth:
                self._kept = None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of these rows (int64 [n], on the model's device) of the pass, in the model's dtype. Queued on
        the current stream; inside `keeping` alone."""
        return self.logits_of(self.hidden[rows])

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, D] such as the decoder returns; behind the first pass."""
        decoder, kept = self._decoder, self._kept
        if decoder is None or self._form is None:
            raise InvariantBroken("logits before the first pass")
        part = replace(self._form, last_hidden_state=states[None])
        own = decoder.__dict__.get("forward")
        decoder.forward = lambda *_args, **_kwargs: part
        try:
            with self._inference():
                ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
                output = self._model(input_ids=ids, use_cache=False)
        finally:
            # the hook has seen the part
            self._kept = kept
            if own is None:
                del decoder.forward
            else:
                decoder.forward = own
        logits: torch.Tensor = output.logits[0]
        return logits
