"""Expert routing, captured where it takes effect.

Where kernels have replaced a router, they write the ids as they route (`fused/routers.py`). For all other routers a
forward pre-hook on the experts copies the ids that they are about to use. Either way the one transient buffer
(`fdasync.gpu.capture`) gets the ids that were computed with, never recomputed ones. Shared experts and dense layers are
no routing. Knows no sequences. Made by `aux_data.py`, and by `selfcheck.py` at start-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.router.route import write_ids

from fdasync.cache.debug_rows import check_debug_rows
from fdasync.errors import RunnerError
from fdasync.gpu.capture import CaptureBuffer, copy_ids
from fdasync_transformers.capture.aux_producer import AuxProducer
from fdasync_transformers.model.moe_layers import router_of_dense_experts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers


class RoutingCapture(AuxProducer):
    """Hooks on a model and its fused routers, and the buffer that they fill; `close` detaches both.

    Attributes:
        layers: the MoE layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: MoELayers,
        max_step_tokens: int,
        *,
        debug: bool = False,
        routers: FusedRouters | None = None,
    ) -> None:
        """`debug`: record positions, not ids; `routers`: of the model's layers, where they are fused."""
        copy = write_ids if model.device.type == "cuda" else copy_ids
        self._ids = CaptureBuffer(max_step_tokens, layers.spec, model.device, debug=debug, copy=copy)
        super().__init__(self._ids)
        self.layers = layers
        self._positions: torch.Tensor | None = None
        self._routers = routers
        fused = () if routers is None else routers.rows
        for row, (name, k) in enumerate(zip(layers.names, layers.top_k, strict=True)):
            if row not in fused:
                self._hooks.append(self._attach(model.get_submodule(name), model, name, row, k))
        if routers is not None:
            routers.attach(self._ids, self._pass_positions)

    def begin(self, positions: torch.Tensor | None = None) -> None:
        """As `AuxProducer.begin`; positions are needed in debug."""
        self._positions = positions
        super().begin(positions)

    def check(self, rows: NDArray[np.generic], positions: NDArray[np.int64]) -> None:
        """In debug, raise InvariantBroken unless these rows are of these positions."""
        if self._ids.debug:
            check_debug_rows(rows, positions, self.spec, "as it came off the device")

    def close(self) -> None:
        super().close()
        if self._routers is not None:
            # once: at a second call they may record for another capture
            self._routers.detach()
            self._routers = None

    def _pass_positions(self) -> torch.Tensor:
        if self._positions is None:
            raise RunnerError("routing_debug, and the pass has no positions")
        return self._positions

    def _attach(self, experts: torch.nn.Module, model: PreTrainedModel, name: str, row: int, k: int) -> RemovableHandle:
        router = router_of_dense_experts(model, name)
        if router is None:

            def before_experts(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
                if len(args) < 2:
                    raise RunnerError(f"{name} was called without expert ids")
                self._ids.put(args[1], row, k, self._positions)

            return experts.register_forward_pre_hook(before_experts)

        def after_router(_: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            # the router made the same call on the same logits: same ids, ties included
            self._ids.put(torch.topk(output[1], k, dim=1).indices, row, k, self._positions)

        return router.register_forward_hook(after_router)
