"""Puts kernels in the place of a loaded model's modules, as the configuration asks.

Stands between the plain passes of the self-check, which are the library's code, and everything that follows: so the
self-check compares the fused model with the plain one. Knows configs and the room `fused`. Called by `open_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from fdasync.errors import ConfigError
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.fused.experts import fuse_experts
from fdasync_transformers.fused.layers.fuse import fuse_layers
from fdasync_transformers.fused.layers.linears import prove_linears
from fdasync_transformers.fused.operations import fuse_operations
from fdasync_transformers.fused.proofs import alone
from fdasync_transformers.fused.routers import fuse_routers
from fdasync_transformers.model.families import decoder_layers
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.parallel.whole import agree
from fdasync_transformers.start.runner_config import (
    fits_grouped,
    fuses_experts,
    fuses_layers,
    set_experts,
    uses_kernels,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.fused.live_rows import LiveRows
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers
    from fdasync_transformers.parallel.sums import Sums
    from fdasync_transformers.start.runner_config import TransformersConfig


@dataclass(frozen=True)
class Fused:
    """The result of `fuse`.

    Attributes:
        routers: a capture attaches to them; None where none were tried.
        notes: for people: how much is fused where anything was tried, and why other parts are the library's own.
        parts: what is fused; the same on all ranks of a group.
    """

    routers: FusedRouters | None
    notes: tuple[str, ...]
    parts: tuple[Any, ...] = ()


def set_plain_experts(
    model: PreTrainedModel, config: TransformersConfig, layers: MoELayers | None, limits: RunnerLimits
) -> None:
    """The experts of the plain passes: the library's, by a way that takes no more memory. Raises ConfigError."""
    max_step_tokens = limits.max_step_tokens
    if limits.sum_slices > 1 or (limits.numerics == "fixed" and model.device.type == "cpu"):
        # of any width, that of a slice too, by products that a mode can take one by one
        set_experts(model, "eager", layers, max_step_tokens)
    elif config.quantised_weights != "dequantised" and layers is not None:
        # expert by expert, so that one matrix is dequantised at a time
        set_experts(model, "eager", layers, max_step_tokens)
    elif not fuses_experts(config, model.device) or layers is None:
        set_experts(model, "auto" if config.experts == "fused" else config.experts, layers, max_step_tokens)
    elif (model.device.type == "cuda" and model.dtype != torch.bfloat16) or not fits_grouped(model, layers):
        # the library's own loop waits for the device, which the few passes of a start can; it takes all widths
        set_experts(model, "eager", layers, max_step_tokens)


def fuse(
    model: PreTrainedModel,
    config: TransformersConfig,
    layers: MoELayers | None,
    live: LiveRows,
    limits: RunnerLimits,
    sums: Sums | None = None,
) -> Fused:
    """Fuse what the configuration asks for, each part proven. The routers too: with and without a capture, the
    self-check runs the routers that will serve.

    Of a group (`sums`), each rank proves its own parts, without sums; what one rank keeps, all keep.

    Raises ConfigError where fused experts are asked for by name and a layer differs, where fused layers are and nothing
    is fused, and as `set_experts`; torch.OutOfMemoryError where a proof finds no memory.
    """
    if sums is None:
        return _fuse(model, config, layers, live, limits, None)
    with sums.collectives.apart():
        fused = _fuse(model, config, layers, live, limits, sums)
    # what is whole on every rank was proven by each of them alone, of the same weights
    told = sums.collectives.tell(xxhash.xxh3_128_digest(repr(fused.parts).encode()), "what is fused")
    if len(set(told)) > 1:
        others = ", ".join(str(rank) for rank, one in enumerate(told) if one != told[0])
        problem = f"rank {others} of {len(told)} fuses other modules than rank 0"
        raise ConfigError("tensor_parallel", problem, hint="all ranks need GPUs of one kind")
    return fused


def _fuse(
    model: PreTrainedModel,
    config: TransformersConfig,
    layers: MoELayers | None,
    live: LiveRows,
    limits: RunnerLimits,
    sums: Sums | None,
) -> Fused:
    notes: tuple[str, ...] = ()
    counts: list[str] = []
    parts: list[Any] = []
    one = alone if sums is None else partial(_agree, sums)
    moe = 0 if layers is None else len(layers.ids)
    head = head_of(model)
    depth = 0 if head is None else head.depth
    if config.experts == "fused" and layers is None:
        notes = ("experts: this model has none that could be fused",)
    if fuses_experts(config, model.device) and layers is not None:
        # by the same interface
        further = [] if head is None else [each.module for each in find_experts(head).values()]
        experts = fuse_experts(model, layers, live, one, further)
        notes = experts.notes
        parts.append(experts.fused)
        counts.append(f"experts of {moe if experts.fused else 0} of {moe} layers")
        if not experts.fused:
            if config.quantised_weights != "dequantised":
                problem = f"{config.quantised_weights!r}, and {'; '.join(notes)}"
                raise ConfigError("runner_config.quantised_weights", problem, hint='use "dequantised"')
            if config.experts == "fused":
                raise ConfigError("runner_config.experts", "; ".join(notes), hint='use "auto"')
            set_experts(model, "auto", layers, limits.max_step_tokens)
    if config.quantised_weights == "stored_linears":
        linears, problem = prove_linears(model, one)
        if problem:
            problem = f"the kernels of stored linear layers do not compute what the library does: {problem}"
            raise ConfigError("runner_config.quantised_weights", problem, hint='use "stored"')
        counts.append(f"{linears} stored linear layers")
        parts.append(linears)
    if fuses_layers(config, model.device):
        # operations first: what a fused layer does not take over is fused then
        operations, whole = (
            fuse_operations(model, one),
            fuse_layers(
                model,
                exact=FixedNumerics if limits.numerics == "fixed" else None,
                sums=sums,
                agree=one,
                further=[] if head is None else head.blocks,
                live=live,
            ),
        )
        notes += (*operations.notes, *whole.notes)
        fused = (whole.indices, operations.norms, operations.rotary, operations.dense, operations.angles)
        parts += fused
        if config.fused_layers and not any(fused):
            problem = "; ".join((*operations.notes, *whole.notes))
            raise ConfigError("runner_config.fused_layers", f"nothing is fused: {problem}", hint="leave it out")
        counts.insert(0, f"{len(whole.indices)} of {len(decoder_layers(model)) + depth} decoder layers")
        counts += [
            f"{len(operations.norms)} norms",
            f"{len(operations.rotary)} rotary embeddings",
            f"{len(operations.dense)} gates",
            f"{len(operations.angles)} tables of angles",
        ]
    routers = None
    if config.fused_router and uses_kernels(config, model.device) and layers is not None:
        routers = fuse_routers(model, layers)
        notes += routers.notes
        parts.append(routers.rows)
        counts.append(f"{len(routers.rows)} of {moe} routers")
    return Fused(routers, (f"fused: {', '.join(counts)}", *notes) if counts else notes, tuple(parts))


def _agree(sums: Sums, reason: str) -> str:
    return agree(sums.collectives, reason, "a proof")
