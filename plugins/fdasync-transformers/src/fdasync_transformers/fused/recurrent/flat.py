"""Runs mixers on whole flattened steps by kernels: one call of the library's forward for all tokens of a step.

The library's code of a mixer is projections, a short convolution, a recurrence, and what follows. Every family calls
convolution and recurrence by the same names; here the forward is the library's code with kernels of ours under these
names (`fdasync_kernels.recurrence`), which know the sequences of the step and where their states lie. All else
takes rows as they come. So a step has no loop over sequences, and a graph can replay it. Knows no attention and no KV.
Called by `execution/device_step.py`; `find_missing` by `start/recurrent.py`.
"""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from fdasync.errors import InvariantBroken, UnsupportedModel
from fdasync_transformers.fused.recurrent.gated_delta import GatedDelta, check_net
from fdasync_transformers.fused.replacement import Place, Replacement, alone, replace
from fdasync_transformers.model.recurrent.mixers import find_mixers, methods_of, source_of, state_calls
from fdasync_transformers.model.recurrent.states import StateLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fdasync_kernels.recurrence.recur import Norm
    from fdasync_kernels.recurrence.spans import Spans

    from fdasync_transformers.fused.recurrent.gated_delta import Computes
    from fdasync_transformers.fused.replacement import Agree, Case
    from fdasync_transformers.model.recurrent.mixers import Mixer
    from fdasync_transformers.model.recurrent.states import Kind, Part, States
    from fdasync_transformers.model.recurrent.steps import MixedForward

_CONVOLUTION = "causal_conv1d_fn"
_SILU = ("silu", "swish")
# how a forward hands it on
_ACTIVATION = re.compile(r"\bactivation=self\.(\w+)")


def find_missing(model: torch.nn.Module) -> str:
    """What a mixer of the model does that no kernel does, for people; "": there is nothing."""
    for mixer in find_mixers(model):
        kind = type(mixer.module)
        source, whole = source_of(kind), methods_of(kind)
        keeps = "update_recurrent_state(" in source or "set_linear_cache(" in source
        known = [name for name in _RECURRENCES if f"{name}(" in source]
        if f"{_CONVOLUTION}(" not in source or len(known) != keeps or state_calls(source) != state_calls(whole):
            return f"the recurrence of {mixer.name} ({kind.__name__})"
        for name in _ACTIVATION.findall(whole):
            activation = getattr(mixer.module, name, None)
            if activation is not None and activation not in _SILU:
                return f"the activation {activation!r:.60} of the convolution of {mixer.name} ({kind.__name__})"
    return ""


class FlatSteps:
    """See the module.

    Attributes:
        notes: for people: which mixers that few kernels could compute keep the library's code, and why.
    """

    def __init__(self, forwards: Sequence[MixedForward], layout: StateLayout, agree: Agree = alone) -> None:
        """Args:
        forwards: of all mixers of a model for which `find_missing` finds nothing.
        agree: what the ranks of a group make of a reason to keep the library's code.
        """
        for name, parts in layout.parts.items():
            dtypes = {layout.specs[part.spec].dtype for part in parts if part.kind == "recurrent"}
            if dtypes - {"float32"}:
                # kernels keep it in float32 within a chunk: its bits would depend on how tokens come
                raise UnsupportedModel(name, f"a recurrent state in {', '.join(sorted(dtypes))} has no kernel")
        self._forwards = tuple(forwards)
        nets = Nets(layout, [_FlatForward(one.mixer, layout.parts[one.mixer.name]) for one in forwards])
        self.notes = replace(nets, [one.mixer for one in forwards], agree).notes
        self._flat = tuple(nets.flat)

    @contextmanager
    def step(self, spans: Spans, states: States) -> Iterator[None]:
        """Within the context the model computes the rows of these spans."""
        try:
            for forward, flat in zip(self._forwards, self._flat, strict=True):
                forward.compute = partial(flat, spans, states)
            yield
        finally:
            for forward in self._forwards:
                forward.compute = None


class Nets(Replacement[GatedDelta]):
    """Mixers that few kernels may compute; one of a class is tried.

    Attributes:
        flat: of each mixer, what computes it: by the library's code, until it is replaced.
    """

    what, which = "gated delta nets", "recurrent layers"

    def __init__(self, layout: StateLayout, flat: list[Computes]) -> None:
        self.flat = flat
        self._layout = layout

    def finds(self, model: Sequence[Mixer]) -> Iterator[Place]:
        for number, mixer in enumerate(model):
            kind = type(mixer.module)
            if GatedDelta.knows(kind):
                known = GatedDelta.make(mixer, self._layout.parts[mixer.name])
                refusal = "" if known else "they are built otherwise than the class that is known"
                yield Place(mixer.name, mixer, kind.__name__, refusal=refusal, key=kind.__name__, given=(number, known))

    def candidates(self, place: Place) -> tuple[GatedDelta, ...]:
        return (place.given[1],)

    def cases(self, place: Place) -> list[Case[GatedDelta]]:
        own = StateLayout(self._layout.specs, {place.name: self._layout.parts[place.name]})
        return [partial(check_net, self.flat[place.given[0]], own)]

    def put(self, place: Place, candidate: GatedDelta) -> None:
        # of its class one was tried
        del candidate
        number, known = place.given
        self.flat[number] = known


class _FlatForward:
    """The forward of one mixer, with kernels in it."""

    def __init__(self, mixer: Mixer, parts: tuple[Part, ...]) -> None:
        self._mixer = mixer
        self._parts = {(part.kind, part.number): part for part in parts}
        library: Any = inspect.unwrap(type(mixer.module).forward)
        ours = {name: partial(compute, self) for name, compute in _RECURRENCES.items()}
        names = {**library.__globals__, **ours, _CONVOLUTION: self._convolve}
        forward = FunctionType(library.__code__, names, library.__name__, library.__defaults__, library.__closure__)
        forward.__kwdefaults__ = library.__kwdefaults__
        self._forward = MethodType(forward, mixer.module)
        self._cache: _NoCache | None = None
        self._spans: Spans | None = None
        self._states: States | None = None

    def __call__(self, spans: Spans, states: States, hidden: torch.Tensor, others: dict[str, Any]) -> Any:
        self._spans, self._states, self._cache = spans, states, _NoCache()
        try:
            return self._forward(**{self._mixer.hidden: hidden, self._mixer.cache: self._cache, **others})
        finally:
            self._spans = self._states = self._cache = None

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        *,
        scale: float,
        norm: Norm,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """As the kernel, of [1, T, ...]."""
        from fdasync_kernels.recurrence.recur import recur

        states, spans = self._states_of("recurrent", 0)
        rates = None if beta is None else beta[0]
        query, key, value = (_side_by_side(one[0]) for one in (query, key, value))
        out = recur(query, key, value, decay[0], rates, states, spans, scale=scale, norm=norm, dtype=dtype)
        return out[None]

    def _convolve(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Replaces the library's convolution: [1, C, T] to the same shape."""
        from fdasync_kernels.recurrence.conv import convolve

        if activation is not None and activation not in _SILU:
            raise UnsupportedModel(
                type(self._mixer.module).__name__, f"no kernel has the activation {activation} of its convolution"
            )
        assert self._cache is not None
        states, spans = self._states_of("convolution", self._cache.number)
        rows = _side_by_side(hidden[0].T)
        return convolve(rows, weight, bias, states, spans, silu=activation is not None).T[None]

    def _states_of(self, kind: Kind, number: int) -> tuple[torch.Tensor, Spans]:
        part = self._parts.get((kind, number))
        if part is None or self._spans is None or self._states is None:
            raise InvariantBroken(f"{self._mixer.name} asks for {kind} state {number}, which no step or probe knows")
        return self._states.rows[part.spec][:, part.row], self._spans


class _NoCache:
    """Stands in the place of the library's cache: a mixer finds no state in it and leaves none; the kernels do.

    Attributes:
        number: of the convolution's state that was named last.
    """

    def __init__(self) -> None:
        self.number = 0

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> None:
        self.number = state_idx

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> None:
        """There is none."""

    def update_conv_state(self, states: torch.Tensor, _layer: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.number = state_idx
        return states

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0) -> None:
        """The kernel has left it."""


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _delta_rule(norm: Norm, flat: _FlatForward, *args: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch_chunk_gated_delta_rule` (decay [1, T, H]) and `chunk_kimi_delta_attention` ([1, T, H, K])."""
    query, key, value = args
    if not named.get("use_qk_l2norm_in_kernel"):
        norm = "none"
    scale = float(query.shape[-1]) ** -0.5
    out = flat.recur(query, key, value, named["g"], named["beta"], scale=scale, norm=norm)
    # a state that nobody reads
    return out, out.new_empty(0)


def _scan(
    flat: _FlatForward,
    hidden: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,  # noqa: ARG001 - the library's; here nothing comes in chunks
    *,
    D: torch.Tensor | None = None,  # noqa: N803 - the library's
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mamba2_chunk_scan`: hidden [1, T, H, P], dt [1, T, H], a [H], b and c [1, T, G, N]; float32."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    hidden = hidden.float()
    decay = a.float() * dt
    out = flat.recur(c, b, hidden * dt[..., None], decay, None, scale=1.0, norm="none")
    return out if D is None else out + D[..., None] * hidden, out.new_empty(0)


#: by the names that the library's forwards call
_RECURRENCES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": partial(_delta_rule, "rsqrt"),
    "chunk_kimi_delta_attention": partial(_delta_rule, "divide"),
    "mamba2_chunk_scan": _scan,
}
