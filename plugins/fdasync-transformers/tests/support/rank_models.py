"""A tiny model as one of several ranks has it, with fixed numerics, and what a group of such ranks computes."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.parallel.slices import Slices
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from ranks import as_ranks, returned
from rollout_bits import played, served_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from fdasync.ipc.exchange import Exchange


def sliced_logits(
    family: str, dtypes: Sequence[torch.dtype], sequences: list[torch.Tensor], ranks: int, slices: int = 4
) -> list[list[torch.Tensor]]:
    """Logits [tokens of all, V] at each rank in each dtype, as `rollout_bits.rollout_logits`: each sequence in two
    chunks."""
    # before there are ranks, which are forks and find it made
    made = [_made(family, dtype, slices) for dtype in dtypes]

    def work(exchange: Exchange | None) -> list[torch.Tensor]:
        return [_logits(*one, sequences, exchange) for one in made]

    return [work(None)] if ranks == 1 else returned(as_ranks(ranks, work))


@lru_cache(maxsize=2)
def _made(family: str, dtype: torch.dtype, slices: int) -> tuple[Any, Slices]:
    """The whole model, to be copied, and how its sums are cut."""
    model: Any = served_in(make_tiny_model(family), dtype)
    # takes all widths
    model.set_experts_implementation("eager")
    return model, Slices(copy.deepcopy(model).to("meta"), slices, latent=True)


def _logits(whole: Any, planned: Slices, sequences: list[torch.Tensor], exchange: Exchange | None) -> torch.Tensor:
    model = copy.deepcopy(whole)
    sharded, collectives = None, None
    if exchange is not None:
        collectives = HostCollectives(exchange)
        sharded = cut_for(model, exchange)
    planned.attach(model, collectives)
    mends = families.mend(model)
    layers = probe.attention_layers(model, latent=True, query_scales=mends.query_scales)
    layout = KVLayout(layers, model.dtype) if sharded is None else sharded.layout(layers)
    return played(StepModel(model, layout, fixed=True), sequences, 17)


def cut_for(model: Any, exchange: Exchange) -> Sharded:
    """Leave a whole model this rank's parts."""
    whole = dict(model.named_parameters())
    sharded = Sharded(model, exchange.rank, exchange.ranks, latent=True)
    for name, cut in sharded.cuts.items():
        Target(model.get_parameter(name).data, tuple(whole[name].shape), cut).put(0, whole[name].data)
    return sharded
