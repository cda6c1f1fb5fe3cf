"""The second block of a fused layer: experts or a dense MLP, added to the residual stream and normed in one kernel.

Router, experts, shared experts and dense MLPs are called as the modules that they are, so hooks on them fire and what
replaced their forwards stays. Experts that can are asked for their parts, whose sum is then a part of that kernel.
Where ranks of a group hold parts of the experts, the results of experts and shared experts are summed over the ranks
once, by that kernel where the rows are few, else before it.
Knows modules of the library by their parts. Made by `fuse.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.modules import past_modes
from fdasync_transformers.model.moe_layers import experts_taking

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_kernels.collectives.peer_memory import PeerMemory
    from fdasync_kernels.layer.finish import Norm

    from fdasync_transformers.parallel.sums import Sums

    #: normed input [T, H], residual stream [T, H], norm of the next block, live rows -> stream and its norm
    Block = Callable[
        [torch.Tensor, torch.Tensor, Norm | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]
    ]


@dataclass(frozen=True)
class BlockKind:
    """Names of the parts of a family's MoE block.

    Attributes:
        router: returns logits, weights and ids.
        shared: experts that every token gets; "" where there are none.
        shared_gate: the linear whose sigmoid their output is multiplied with; "": none.
    """

    router: str = "gate"
    shared: str = ""
    shared_gate: str = ""


class DenseBlock:
    """A dense MLP."""

    def __init__(self, module: Any) -> None:
        from fdasync_kernels.layer.finish import add_norm

        self.module = module
        self._add_norm = add_norm

    def __call__(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, live: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Block`."""
        del live
        return self._add_norm(self.module(normed), residual, norm)

    def separately(self, normed: torch.Tensor) -> torch.Tensor:
        """The block's output by separate operations, for proofs."""
        found: torch.Tensor = self.module(normed)
        return found


class ExpertsBlock:
    """A MoE block.

    Attributes:
        gated: whether the shared experts have a gate.
        parts: whether its experts are asked for their parts, of a group where the last kernel sums them over the ranks;
            set once, before the first step.
        exact: whether that gate is an operation of its own, whose sigmoid has other last bits than the kernel's.
    """

    def __init__(self, module: Any, kind: BlockKind, *, exact: bool = False, sums: Sums | None = None) -> None:
        from fdasync_kernels.layer.finish import add_norm, finish_experts

        self._add_norm = add_norm
        self._finish = finish_experts
        self._router = getattr(module, kind.router)
        self._experts = module.experts
        self._num_experts = int(module.experts.num_experts)
        self._shared: Any = getattr(module, kind.shared) if kind.shared else None
        self._gate: Any = getattr(module, kind.shared_gate) if kind.shared_gate else None
        self.gated = self._gate is not None
        self.exact = exact
        # of a group: what the ranks have is summed before it is added to the stream
        self._sums = sums if sums is not None and sums.within(module.experts) else None
        self._shared_summed = self._sums is not None and self._shared is not None and self._sums.within(self._shared)
        # shared experts that every rank has whole are added behind the sum
        self.parts = _take_parts(module.experts) and (self._sums is None or self._shared is None or self._shared_summed)

    def __call__(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, live: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Block`."""
        _, weights, ids = self._router(normed)
        sums = self._sums
        peers = None if sums is None else sums.peers(residual, self._experts)
        whole = sums is None or peers is not None or sums.collectives.is_apart
        if not self.parts or not whole:
            return self._add_norm(self._summed(normed, ids, weights), residual, norm)
        with nullcontext() if sums is None else sums.collectives.apart():
            return self._finished(normed, ids, weights, residual, norm, live, peers)

    def _finished(
        self,
        normed: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        live: torch.Tensor | None,
        peers: PeerMemory | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Block`: one kernel adds up all that the block is made of."""
        shared = gate = None
        if self._shared is not None:
            shared = self._shared(normed)
            if self._gate is not None:
                gate = self._gate(normed)
                if self.exact:
                    shared, gate = torch.sigmoid(gate) * shared, None
        # kernels alone
        with past_modes():
            ids = ids.contiguous()
            parts = self._experts(normed, ids, weights, parts=True)
            return self._finish(
                parts, ids, self._num_experts, residual, norm, live=live, shared=shared, shared_gate=gate, peers=peers
            )

    def separately(self, normed: torch.Tensor) -> torch.Tensor:
        """As of `DenseBlock`."""
        _, weights, ids = self._router(normed)
        return self._summed(normed, ids, weights)

    def _summed(self, normed: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            return self._with_shared(self._experts(normed, ids, weights), normed)
        with self._sums.collectives.apart():
            found: torch.Tensor = self._experts(normed, ids, weights)
            if self._shared_summed:
                found = self._with_shared(found, normed)
        found = self._sums.total(found, self._experts)
        return found if self._shared_summed else self._with_shared(found, normed)

    def _with_shared(self, found: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        if self._shared is None:
            return found
        shared: torch.Tensor = self._shared(normed)
        return found + (shared if self._gate is None else torch.sigmoid(self._gate(normed)) * shared)


def make_block(
    module: Any, kind: BlockKind, *, exact: bool = False, sums: Sums | None = None
) -> DenseBlock | ExpertsBlock:
    """The block of a layer's `mlp`. `sums`: of the ranks of a group."""
    return ExpertsBlock(module, kind, exact=exact, sums=sums) if hasattr(module, "experts") else DenseBlock(module)


def _take_parts(experts: Any) -> bool:
    """Whether the implementation of experts gives their parts, by its signature. A forward put on them gives a sum."""
    return "forward" not in vars(experts) and experts_taking(experts, "parts") is not None
