"""Runs the mixers of a model in flattened steps: each piece of a step with the state of its own sequence.

While a step is under way, the forward of every mixer is ours: it hands each piece (`pieces.py`) to the library's
forward, with a cache (`cache.py`) whose tensors are the lane's state (`states.py`), and copies state to the places of
snapshots in between. Outside of steps the library's forward is called as it is. Knows no attention and no KV. Called by
`execution/step.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.recurrent.cache import StateCache, StateLayer
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.model.recurrent.outputs import joined, per_token
from fdasync_transformers.model.recurrent.time_steps import bounded_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_transformers.model.recurrent.mixers import Mixer
    from fdasync_transformers.model.recurrent.pieces import Piece, Pieces
    from fdasync_transformers.model.recurrent.states import Part, StateLayout, States

    #: computes a mixer: its hidden states and its further arguments
    Compute = Callable[[torch.Tensor, dict[str, Any]], Any]


class MixedForward:
    """The forward of a mixer, ours while `compute` is set.

    Attributes:
        mixer: whose forward it is.
        library: the forward that it had.
        compute: takes the call instead of the library.
    """

    def __init__(self, mixer: Mixer) -> None:
        own: Any = mixer.module.forward
        self._before = vars(mixer.module).get("forward")
        self.mixer = mixer
        self.library: Callable[..., Any] = own.library if isinstance(own, MixedForward) else own
        self.compute: Compute | None = None
        self._bounded = bounded_forward(mixer.module) or self.library
        module: Any = mixer.module
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compute is None:
            return self.library(*args, **kwargs)
        mixer = self.mixer
        hidden = args[0] if args else kwargs[mixer.hidden]
        # there is no padding to mask
        others = {name: None if name.endswith("mask") else kwargs.get(name) for name in mixer.others}
        return self.compute(hidden, others)

    def call(self, hidden: torch.Tensor, others: dict[str, Any], layer: StateLayer) -> Any:
        """The library's answer to one piece, with this state."""
        mixer = self.mixer
        named = {mixer.hidden: hidden, mixer.cache: StateCache(mixer.layer, layer), **others}
        return self._bounded(**named)

    def detach(self) -> None:
        """The module has the forward again that it had."""
        module: Any = self.mixer.module
        del module.forward
        if self._before is not None:
            module.forward = self._before


class RecurrentSteps:
    """See the module.

    Attributes:
        layout: as `probe.find_state` found it in this model.
        forwards: of its mixers.
    """

    def __init__(self, model: torch.nn.Module, layout: StateLayout) -> None:
        self.layout = layout
        self.forwards = [MixedForward(mixer) for mixer in find_mixers(model)]

    @contextmanager
    def step(self, pieces: Pieces, states: States) -> Iterator[None]:
        """Within the context the model computes these pieces, in this order."""
        lanes = torch.tensor([piece.lane for piece in pieces.singles], device=states.memory.device)
        try:
            for forward in self.forwards:
                parts = self.layout.parts[forward.mixer.name]
                forward.compute = _MixerStep(forward, parts, pieces, states, lanes)
            yield
        finally:
            for forward in self.forwards:
                forward.compute = None


class _MixerStep:
    """One mixer's part of a step."""

    def __init__(
        self, forward: MixedForward, parts: tuple[Part, ...], pieces: Pieces, states: States, lanes: torch.Tensor
    ) -> None:
        self._forward = forward
        self._parts = parts
        self._pieces = pieces
        self._states = states
        self._lanes = lanes

    def __call__(self, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        singles, rest = self._pieces
        outputs: list[tuple[torch.Tensor | None, ...]] = []
        if singles:
            out = self._together(hidden[:, : len(singles)].transpose(0, 1), others)
            parts = per_token(out, len(singles), 1)
            outputs.append(tuple(None if part is None else part.transpose(0, 1) for part in parts))
        at = len(singles)
        for piece in rest:
            out = self._alone(piece, hidden[:, at : at + piece.num_tokens], others)
            outputs.append(per_token(out, 1, piece.num_tokens))
            at += piece.num_tokens
        if at != hidden.shape[1]:
            raise InvariantBroken(f"{self._forward.mixer.name} has {hidden.shape[1]} tokens, the step's pieces {at}")
        whole = joined(outputs)
        return whole if isinstance(out, tuple) else whole[0]

    def _alone(self, piece: Piece, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        layer = StateLayer()
        for part in self._parts:
            live = self._states.live[part.spec]
            layer.hold(part, part.as_library(live[piece.lane : piece.lane + 1, part.row]), fresh=piece.fresh)
        out = self._forward.call(hidden, others, layer)
        self._take(piece)
        return out

    def _together(self, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        layer = StateLayer()
        moved = [(part, self._states.live[part.spec][:, part.row]) for part in self._parts]
        gathered = [live.index_select(0, self._lanes) for _, live in moved]
        for (part, _), state in zip(moved, gathered, strict=True):
            layer.hold(part, part.as_library(state), fresh=False)
        out = self._forward.call(hidden, others, layer)
        for (_, live), state in zip(moved, gathered, strict=True):
            live.index_copy_(0, self._lanes, state)
        for piece in self._pieces.singles:
            self._take(piece)
        return out

    def _take(self, piece: Piece) -> None:
        if piece.place >= 0:
            for part in self._parts:
                self._states.take(part, piece.lane, piece.place)
