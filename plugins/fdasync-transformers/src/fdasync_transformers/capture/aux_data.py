"""The aux data of a model: the routing where it is captured, and the data that `runner_config` asks for.

`aux_specs` lists the specs; `make_aux` attaches the producers. Step models and the parts of steps know one object,
`AuxData`, and no producer. A new aux datum is a producer (`aux_producer.py`) and a branch in each of these two
functions. Called by `bound_runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.aux import FINAL_HIDDEN
from fdasync.errors import ConfigError
from fdasync_transformers.capture.final_hidden import FinalHidden
from fdasync_transformers.capture.layer_norms import LayerNorms
from fdasync_transformers.capture.router_weights import RouterWeights
from fdasync_transformers.capture.routing import RoutingCapture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from fdasync.cache.aux import AuxSpec
    from fdasync_transformers.capture.aux_producer import AuxProducer
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers


class AuxData:
    """The producers of a runner, in the order of its specs; a row is of all of them or of none.

    Attributes:
        producers: none where no datum is recorded.
    """

    def __init__(self, producers: Sequence[AuxProducer] = ()) -> None:
        self.producers = tuple(producers)

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token's rows, of all specs."""
        return sum(producer.spec.token_nbytes for producer in self.producers)

    def begin(self, positions: torch.Tensor) -> None:
        """Call before a forward pass of tokens at these positions (int64 [T], on the device)."""
        for producer in self.producers:
            producer.begin(positions)

    def end(self) -> None:
        """Call after the forward pass. Raises RunnerError if a layer wrote nothing."""
        for producer in self.producers:
            producer.end()

    def stage(self, count: int) -> dict[str, torch.Tensor]:
        """Copy the rows of the last pass's `count` tokens aside on the device; by the name of their spec."""
        return {producer.spec.name: producer.stage(count) for producer in self.producers}

    def read(
        self, staged: Mapping[str, NDArray[np.generic]], positions: NDArray[np.int64]
    ) -> dict[str, NDArray[np.generic]]:
        """The rows of `stage`, copied to the host, as the specs' dtypes: the argument of `AuxArena.scatter`.

        Raises InvariantBroken where rows cannot be of these positions.
        """
        values = {
            producer.spec.name: staged[producer.spec.name].view(producer.spec.dtype) for producer in self.producers
        }
        for producer in self.producers:
            producer.check(values[producer.spec.name], positions)
        return values

    def close(self) -> None:
        """Detach all producers from the model; may be called twice."""
        # in reverse order of attaching
        for producer in reversed(self.producers):
            producer.close()


def aux_specs(model: PreTrainedModel, moe: MoELayers | None, asked: Sequence[str]) -> tuple[AuxSpec, ...]:
    """The specs of the producers that `make_aux` attaches, in their order.

    Args:
        moe: the model's MoE layers; None where their routing is not captured.
        asked: names of `TransformersConfig.aux`.

    Raises:
        ConfigError: a name comes twice, or there is no routing whose weights could be recorded.
    """
    if len(set(asked)) != len(asked):
        raise ConfigError("runner_config.aux", f"{list(asked)} names a datum twice")
    specs = [] if moe is None else [moe.spec]
    for name in asked:
        if name == "layer_norms":
            specs.append(LayerNorms.spec_of(model))
        elif name == FINAL_HIDDEN:
            specs.append(FinalHidden.spec_of(model))
        elif moe is None:
            raise ConfigError(
                "runner_config.aux", f"{name} without captured routing", hint='leave it out, or set routing to "auto"'
            )
        else:
            specs.append(RouterWeights.spec_of(moe))
    return tuple(specs)


def make_aux(
    model: PreTrainedModel,
    moe: MoELayers | None,
    asked: Sequence[str],
    max_step_tokens: int,
    *,
    debug: bool = False,
    routers: FusedRouters | None = None,
) -> AuxData:
    """Attach the producers of `aux_specs` to a model.

    Args:
        debug: record positions, not expert ids.
        routers: of the model, where they are fused.
    """
    producers: list[AuxProducer] = []
    try:
        if moe is not None:
            producers.append(RoutingCapture(model, moe, max_step_tokens, debug=debug, routers=routers))
        for name in asked:
            if name == "layer_norms":
                producers.append(LayerNorms(model, max_step_tokens))
            elif name == FINAL_HIDDEN:
                producers.append(FinalHidden(model, max_step_tokens))
            elif moe is not None:
                producers.append(RouterWeights(model, moe, max_step_tokens))
    except BaseException:
        # the model must not keep the hooks of producers attached so far
        for producer in producers:
            producer.close()
        raise
    return AuxData(producers)
