"""Gated delta nets by few kernels: projections, convolution, recurrence with its gates, gated norm, projection.

Known by class: someone read the library's code of Qwen3-Next and Qwen3.5 and found this structure (transformers 5.23).
Of forty launches six or eight remain. What is made here is compared with the library's code on random rows before it is
used (`check_net`); what differs keeps the way of `flat.py`. Knows no steps. Called by `flat.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.known import NETS
from fdasync_transformers.fused.modules import check_size
from fdasync_transformers.model.recurrent.states import States

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_kernels.recurrence.spans import Spans

    from fdasync_transformers.model.recurrent.mixers import Mixer
    from fdasync_transformers.model.recurrent.states import Part, StateLayout

    #: computes a mixer's rows with the states of their sequences: hidden states and further arguments
    Computes = Callable[[Spans, States, torch.Tensor, dict[str, Any]], Any]

_TOKENS = 5
# relative: only the order of sums is ours
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}


class GatedDelta:
    """The forward of one gated delta net; see the module. `make` makes it where its class is known."""

    def __init__(self, mixer: Mixer, parts: tuple[Part, ...]) -> None:
        module: Any = mixer.module
        self._module = module
        self._together = hasattr(module, "in_proj_qkvz")
        self._parts = {part.kind: part for part in parts}
        self._groups, self._heads = int(module.num_k_heads), int(module.num_v_heads)
        self._keys, self._values = int(module.head_k_dim), int(module.head_v_dim)
        self._columns = self._where() if self._together else None

    @classmethod
    def make(cls, mixer: Mixer, parts: tuple[Part, ...]) -> GatedDelta | None:
        """None: the module is of another class, or is built otherwise."""
        module: Any = mixer.module
        known = NETS.get(type(module).__name__, ())
        if not known or not all(hasattr(module, name) for name in known):
            return None
        plain = module.activation == "silu" and module.norm.activation == "silu" and module.conv1d.bias is None
        return cls(mixer, parts) if plain and {part.kind for part in parts} == {"convolution", "recurrent"} else None

    @staticmethod
    def knows(kind: type) -> bool:
        """Whether mixers of this class are computed so, unless they are built otherwise."""
        return kind.__name__ in NETS

    def _where(self) -> torch.Tensor:
        """Where each channel of the convolution is in a row of the merged projection: by groups of heads, of each its
        query, key, values and gates."""
        share = self._heads // self._groups * self._values
        begin = torch.arange(self._groups)[:, None] * (2 * self._keys + 2 * share)
        spans = (0, self._keys), (self._keys, self._keys), (2 * self._keys, share)
        parts = [(begin + first + torch.arange(count)).flatten() for first, count in spans]
        return torch.cat(parts).to(torch.int32).to(self._module.conv1d.weight.device)

    def __call__(self, spans: Spans, states: States, hidden: torch.Tensor, _: dict[str, Any]) -> torch.Tensor:
        from fdasync_kernels.recurrence.conv import convolve
        from fdasync_kernels.recurrence.norm import norm_gated
        from fdasync_kernels.recurrence.recur import Gates, recur

        module, rows = self._module, hidden.shape[1]
        share = self._heads // self._groups
        if self._together:
            mixed = module.in_proj_qkvz(hidden)[0]
            gates = module.in_proj_ba(hidden).view(rows, self._groups, 2 * share)
            rates, fades = gates[..., :share], gates[..., share:]
            z = mixed.view(rows, self._groups, -1)[..., 2 * self._keys + share * self._values :]
        else:
            mixed = module.in_proj_qkv(hidden)[0]
            z = module.in_proj_z(hidden).view(rows, self._groups, -1)
            rates, fades = (
                project(hidden).view(rows, self._groups, share) for project in (module.in_proj_b, module.in_proj_a)
            )
        part = self._parts["convolution"]
        inner = convolve(
            mixed, module.conv1d.weight.squeeze(1), None, states.rows[part.spec][:, part.row], spans, silu=True,
            columns=self._columns,
        )  # fmt: skip
        width = self._groups * self._keys
        query, key, value = torch.split(inner, [width, width, self._heads * self._values], -1)
        part = self._parts["recurrent"]
        out = recur(
            query.view(rows, self._groups, self._keys), key.view(rows, self._groups, self._keys),
            value.view(rows, self._heads, self._values), fades, rates, states.rows[part.spec][:, part.row], spans,
            scale=float(self._keys) ** -0.5, norm="rsqrt", gates=Gates(module.A_log, module.dt_bias),
        )  # fmt: skip
        normed = norm_gated(out, z, module.norm.weight, float(module.norm.variance_epsilon))
        projected: torch.Tensor = module.out_proj(normed[None])
        return projected


def check_net(library: Computes, layout: StateLayout, ours: GatedDelta) -> None:
    """Raise Differs unless the few kernels compute what the library's code does on random rows, of a begun and of a
    fresh sequence. Waits for the device."""
    import numpy as np
    from fdasync_kernels.recurrence.spans import FRESH, PlanSize, Spans, plan_spans

    module = ours._module
    device, dtype = module.out_proj.weight.device, module.out_proj.weight.dtype
    drawn = torch.Generator().manual_seed(7)
    size = PlanSize(2, 2)
    plan = torch.from_numpy(plan_spans(size, np.array([0, FRESH]), np.array([2, 3]), np.array([0, 1]))).to(device)
    owners = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32, device=device)
    hidden = torch.randn(1, _TOKENS, int(module.hidden_size), generator=drawn).to(dtype).to(device)
    results, spans = [], Spans.of(plan, size, owners, 2)
    for compute in (ours, library):
        states = States(layout, 2, 0, device)
        for rows in states.rows:
            rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(8)))
        # of this layer alone: states that are not written are equal
        own = [states.rows[part.spec][:, part.row] for part in ours._parts.values()]
        results.append((compute(spans, states, hidden, {})[0], *own))
    for got, wanted in zip(*results, strict=True):
        check_size(got, wanted, _TOLERANCE.get(dtype, 0.0))
