"""Expert routing, captured where it takes effect.

On GPUs routers that a kernel can replace write the ids as they route (`fused_router.py`). For all others a forward
pre-hook on the experts copies the ids that they are about to use. Either way what is recorded in the one transient
buffer (`fdasync.gpu.capture`) is what was computed - never a recomputation. Shared experts and dense layers are no
routing. Knows no sequences. Called by `runner.py`, the executors and the step models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.cache.debug_rows import check_debug_rows
from fdasync.errors import RunnerError
from fdasync.gpu.capture import CaptureBuffer
from fdasync_transformers.fused_router import fuse_routers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from fdasync_transformers.fused_router import FusedRouters
    from fdasync_transformers.moe_layers import MoELayers


class RoutingCapture:
    """Fused routers and hooks on a model, and the buffer that they fill; one per runner, removed by `close`.

    Attributes:
        layers: the MoE layers.
        notes: which routers are not fused and why, for people.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: MoELayers,
        max_step_tokens: int,
        *,
        debug: bool = False,
        fuse: bool = False,
    ) -> None:
        """`debug`: record positions, not ids; `fuse`: route by kernel where that can be."""
        self.layers = layers
        self.notes: tuple[str, ...] = ()
        self._buffer = CaptureBuffer(max_step_tokens, layers.spec, model.device, debug=debug)
        self._positions: torch.Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        self._fused: FusedRouters | None = None
        fused: tuple[int, ...] = ()
        if fuse:
            self._fused = fuse_routers(model, layers, self._buffer, self._pass_positions)
            fused, self.notes = self._fused.rows, self._fused.notes
        for row, (name, k) in enumerate(zip(layers.names, layers.top_k, strict=True)):
            if row not in fused:
                self._hooks.append(self._attach(model.get_submodule(name), model, name, row, k))

    @property
    def token_nbytes(self) -> int:
        """Of a token's rows."""
        return self.layers.spec.token_nbytes

    @property
    def nbytes(self) -> int:
        """Of the transient buffers on the device."""
        return self._buffer.nbytes

    def begin(self, positions: torch.Tensor | None = None) -> None:
        """Call before a forward pass of tokens at these positions (int64 [T]; needed in debug)."""
        self._positions = positions
        self._buffer.begin()

    def end(self) -> None:
        """Call after it. Raises RunnerError if a layer was not captured."""
        self._buffer.expect()

    def stage(self, count: int) -> torch.Tensor:
        """Rows of the last pass's `count` tokens set aside on the device; see `CaptureBuffer.stage`."""
        return self._buffer.stage(count)

    def rows(self, count: int) -> NDArray[np.generic]:
        """Rows of the pass's `count` tokens, [count, layers, max k], as the spec's dtype; valid until the next pass.

        Waits for the device. Raises RunnerError if a layer was not captured.
        """
        self.end()
        host: NDArray[np.generic] = self._buffer.buffer[:count].cpu().numpy()
        return host.view(self.layers.spec.dtype)

    def check(self, rows: NDArray[np.generic], positions: NDArray[np.int64]) -> None:
        """In debug, raise InvariantBroken unless these rows are of these positions."""
        if self._buffer.debug:
            check_debug_rows(rows, positions, self.layers.spec, "as it came off the device")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._fused is not None:
            self._fused.undo()

    def _pass_positions(self) -> torch.Tensor:
        if self._positions is None:
            raise RunnerError("routing_debug, and the pass has no positions")
        return self._positions

    def _attach(self, experts: torch.nn.Module, model: PreTrainedModel, name: str, row: int, k: int) -> RemovableHandle:
        router = model.get_submodule(name.removesuffix("experts") + "router") if _takes_no_ids(experts) else None
        if router is None:

            def before_experts(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
                if len(args) < 2:
                    raise RunnerError(f"{name} was called without expert ids")
                self._buffer.put(args[1], row, k, self._positions)

            return experts.register_forward_pre_hook(before_experts)

        def after_router(_: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            # the very call that the router made on the very same logits: same ids, ties included
            self._buffer.put(torch.topk(output[1], k, dim=1).indices, row, k, self._positions)

        return router.register_forward_hook(after_router)


def _takes_no_ids(experts: torch.nn.Module) -> bool:
    """Experts that are dense over all experts (llama 4) are given no ids."""
    return "Llama4" in type(experts).__name__
