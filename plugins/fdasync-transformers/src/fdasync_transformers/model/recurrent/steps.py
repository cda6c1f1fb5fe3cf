"""Runs the mixers of a model in flattened steps: each piece of a step with the state of its own sequence.

While a step is under way, the forward of every mixer is ours: it hands each piece (`pieces.py`) to the library's
forward, with a cache (`cache.py`) whose tensors are the lane's state (`states.py`), and copies state to the places of
snapshots in between. Outside of steps the library's forward is called as it is. Knows no attention and no KV. Called by
`execution/step.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.recurrent.cache import StateCache, StateLayer
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.model.recurrent.outputs import joined, per_token
from fdasync_transformers.model.recurrent.time_steps import bounded_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

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
    def step(self, pieces: Pieces, states: States, rows: NDArray[np.int64]) -> Iterator[None]:
        """Within the context the model computes these pieces, in this order, which have these rows of the step.

        A sequence that decodes several tokens leaves a version of its state behind each (`States.versions`), from the
        second one on. Rows of no piece get zeros.
        """
        tokens = torch.from_numpy(rows).to(states.memory.device)
        rounds = _rounds(pieces.singles, states)
        try:
            for forward in self.forwards:
                parts = self.layout.parts[forward.mixer.name]
                forward.compute = _MixerStep(forward, parts, pieces, states, rounds, tokens)
            yield
        finally:
            for forward in self.forwards:
                forward.compute = None


class _Round(NamedTuple):
    """The tokens of a step with the same number in their sequences, which are computed together, int64 [n].

    Attributes:
        tokens: of the step's.
        sources, targets: rows of the states' memory.
    """

    tokens: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


def _rounds(singles: Sequence[Piece], states: States) -> list[_Round]:
    """The tokens of sequences that decode, one of each at a time: so each has the bits that it has without drafts."""
    device = states.memory.device
    widths = [piece.num_tokens for piece in singles]
    firsts = [end - width for end, width in zip(accumulate(widths), widths, strict=True)]
    rounds = []
    for number in range(max(widths, default=0)):
        going = [(piece, first) for piece, first in zip(singles, firsts, strict=True) if piece.num_tokens > number]
        tokens = [first + number for _, first in going]
        sources = [states.row_of(piece.lane, number) for piece, _ in going]
        targets = [states.row_of(piece.lane, number + 1 if piece.num_tokens > 1 else 0) for piece, _ in going]
        rounds.append(_Round(*(torch.tensor(each, device=device) for each in (tokens, sources, targets))))
    return rounds


class _MixerStep:
    """One mixer's part of a step."""

    def __init__(
        self,
        forward: MixedForward,
        parts: tuple[Part, ...],
        pieces: Pieces,
        states: States,
        rounds: list[_Round],
        tokens: torch.Tensor,
    ) -> None:
        self._forward = forward
        self._parts = parts
        self._pieces = pieces
        self._states = states
        self._rounds = rounds
        self._tokens = tokens

    def __call__(self, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        if hidden.shape[1] == len(self._tokens):
            return self._compute(hidden, others)
        whole = self._compute(hidden.index_select(1, self._tokens), others)
        if isinstance(whole, tuple):
            return tuple(None if part is None else self._placed(part, hidden.shape[1]) for part in whole)
        return self._placed(whole, hidden.shape[1])

    def _placed(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """An output of the pieces, as one of all the step's rows."""
        return part.new_zeros(1, count, *part.shape[2:]).index_copy_(1, self._tokens, part)

    def _compute(self, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        singles, rest = self._pieces
        outputs: list[tuple[torch.Tensor | None, ...]] = []
        out: Any = None
        for each in self._rounds:
            out = self._together(each, hidden, others)
            parts = per_token(out, len(each.tokens), 1)
            outputs.append(tuple(None if part is None else part.transpose(0, 1) for part in parts))
        for piece in singles:
            self._take(piece)
        if len(self._rounds) > 1:
            order = torch.cat([each.tokens for each in self._rounds]).argsort()
            whole = joined(outputs)
            outputs = [tuple(None if part is None else part.index_select(1, order) for part in whole)]
        at = sum(piece.num_tokens for piece in singles)
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

    def _together(self, each: _Round, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        layer = StateLayer()
        moved = [(part, self._states.rows[part.spec][:, part.row]) for part in self._parts]
        gathered = [rows.index_select(0, each.sources) for _, rows in moved]
        for (part, _), state in zip(moved, gathered, strict=True):
            layer.hold(part, part.as_library(state), fresh=False)
        out = self._forward.call(hidden.index_select(1, each.tokens).transpose(0, 1), others, layer)
        for (_, rows), state in zip(moved, gathered, strict=True):
            rows.index_copy_(0, each.targets, state)
        return out

    def _take(self, piece: Piece) -> None:
        if piece.place >= 0:
            for part in self._parts:
                self._states.take(part, piece.lane, piece.place)
