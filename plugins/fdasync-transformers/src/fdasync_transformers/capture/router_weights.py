"""The router's weights of the chosen experts: an aux datum (`routing_weights`).

A forward pre-hook on the experts copies the weights that they are about to use: after the family's renormalisation and
scaling factor, whether the router is the library's or a fused one. They are rounded once, to float16. Slot for slot
they belong to the ids of the routing. Knows no sequences. Made by `aux_data.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fdasync.cache.aux import AuxSpec
from fdasync.errors import RunnerError
from fdasync.gpu.capture import StepRows
from fdasync_transformers.capture.aux_producer import AuxProducer
from fdasync_transformers.model.moe_layers import router_of_dense_experts

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from fdasync_transformers.model.moe_layers import MoELayers


class RouterWeights(AuxProducer):
    """See the module and `AuxProducer`."""

    def __init__(self, model: PreTrainedModel, layers: MoELayers, max_step_tokens: int) -> None:
        super().__init__(StepRows(max_step_tokens, self.spec_of(layers), model.device))
        for row, (name, k) in enumerate(zip(layers.names, layers.top_k, strict=True)):
            self._hooks.append(self._attach(model, name, row, k))

    @staticmethod
    def spec_of(layers: MoELayers) -> AuxSpec:
        """float16, of the shape of the ids."""
        return AuxSpec("routing_weights", layers.spec.shape, "float16")

    def _attach(self, model: PreTrainedModel, name: str, row: int, k: int) -> RemovableHandle:
        router = router_of_dense_experts(model, name)
        if router is None:

            def before_experts(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
                if len(args) < 3 or args[2].dim() != 2 or args[2].shape[1] != k:
                    raise RunnerError(f"{name} was called without the weights of {k} experts a token")
                self._buffer.write(args[2], row)

            return model.get_submodule(name).register_forward_pre_hook(before_experts)

        def after_router(_: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            scores, logits = output
            # as the ids are found (`routing.py`)
            self._buffer.write(scores.gather(1, torch.topk(logits, k, dim=1).indices), row)

        return router.register_forward_hook(after_router)
