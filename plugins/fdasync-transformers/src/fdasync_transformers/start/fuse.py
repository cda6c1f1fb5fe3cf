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
from fdasync_transformers.fused.experts import Experts, fuse_experts
from fdasync_transformers.fused.layers.fuse import Layers
from fdasync_transformers.fused.layers.linears import KeptLinears
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.fused.operations import fuse_operations, operations_of
from fdasync_transformers.fused.recurrent.flat import Nets
from fdasync_transformers.fused.replacement import alone, foresee, no_kernels, replace
from fdasync_transformers.fused.routers import Record, Routers, fuse_routers
from fdasync_transformers.model.families import decoder_layers
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.model.recurrent.mixers import find_mixers
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
    from fdasync_transformers.fused.replacement import Replaced, Replacement
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.moe_layers import MoELayers
    from fdasync_transformers.model.recurrent.states import StateLayout
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

    Raises ConfigError where kernels are asked for by name and cannot run, where fused experts are and a layer differs,
    where fused layers are and nothing is fused, and as `set_experts`; torch.OutOfMemoryError where a proof finds no
    memory.
    """
    if uses_kernels(config, model.device) and no_kernels(model.device):
        problem = f"{config.kernels!r} needs a GPU, or Triton's interpreter: nothing runs them on {model.device}"
        raise ConfigError("runner_config.kernels", problem, hint='use "auto"')
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


def foresee_all(
    model: PreTrainedModel,
    config: TransformersConfig,
    layers: MoELayers | None,
    state: StateLayout | None,
    limits: RunnerLimits,
) -> list[Replaced]:
    """What `fuse` would try on a GPU, and what not, of a model without weights; changes nothing.

    `layers`, `state`: its MoE layers and its recurrent state. No proof runs, so a start may keep more of the library's.
    """
    if config.kernels == "torch":
        return []
    live, head = LiveRows(), head_of(model)
    kinds: list[Replacement[Any]] = []
    if config.fused_layers is not False:
        exact = FixedNumerics if limits.numerics == "fixed" else None
        told = live if limits.tensor_parallel == limits.sum_slices == 1 else None
        kinds.append(Layers(model, exact=exact, further=[] if head is None else head.blocks, live=told))
        kinds += operations_of(model)
    if layers is not None and (config.experts in ("auto", "fused") or config.quantised_weights != "dequantised"):
        further = [] if head is None else [each.module for each in find_experts(head).values()]
        kinds.append(Experts(live, layers, further))
    if layers is not None and config.fused_router:
        kinds.append(Routers(model.dtype, Record(), layers))
    kinds.append(KeptLinears())
    found = [foresee(kind, model) for kind in kinds]
    return found if state is None else [*found, foresee(Nets(state, []), find_mixers(model))]


def _fuse(
    model: PreTrainedModel,
    config: TransformersConfig,
    layers: MoELayers | None,
    live: LiveRows,
    limits: RunnerLimits,
    sums: Sums | None,
) -> Fused:
    notes: tuple[str, ...] = ()
    done: list[tuple[str, Replaced]] = []
    routers = None
    one = alone if sums is None else partial(_agree, sums)
    moe = 0 if layers is None else len(layers.ids)
    head = head_of(model)
    if config.experts == "fused" and layers is None:
        notes = ("experts: this model has none that could be fused",)
    if fuses_experts(config, model.device) and layers is not None:
        # by the same interface
        further = [] if head is None else [each.module for each in find_experts(head).values()]
        experts = fuse_experts(model, layers, live, one, further)
        done.append((f"experts of {min(moe, len(experts.names))} of {moe} layers", experts))
        if not experts.names:
            why = "; ".join(experts.notes)
            if config.quantised_weights != "dequantised":
                problem = f"{config.quantised_weights!r}, and {why}"
                raise ConfigError("runner_config.quantised_weights", problem, hint='use "dequantised"')
            if config.experts == "fused":
                raise ConfigError("runner_config.experts", why, hint='use "auto"')
            set_experts(model, "auto", layers, limits.max_step_tokens)
    if config.quantised_weights == "stored_linears":
        linears = replace(KeptLinears(), model, one)
        for problem in linears.reasons.values():
            problem = f"the kernels of stored linear layers do not compute what the library does: {problem}"
            raise ConfigError("runner_config.quantised_weights", problem, hint='use "stored"')
        done.append((f"{len(linears.names)} stored linear layers", linears))
    if fuses_layers(config, model.device):
        # operations first: what a fused layer does not take over is fused then
        operations = fuse_operations(model, one).values()
        exact, further = (FixedNumerics if limits.numerics == "fixed" else None), ([] if head is None else head.blocks)
        whole = replace(Layers(model, exact=exact, sums=sums, further=further, live=live), model, one)
        if model.device.type == "cuda":
            # the former memory of parts that were merged
            torch.cuda.empty_cache()
        depth = len(decoder_layers(model)) + (0 if head is None else head.depth)
        fused = [(f"{len(each.names)} {each.kind.what}", each) for each in operations]
        done = [(f"{len(whole.names)} of {depth} decoder layers", whole), *done, *fused]
        if config.fused_layers and not any(each.names for each in (whole, *operations)):
            problem = "; ".join(note for each in (*operations, whole) for note in each.notes)
            raise ConfigError("runner_config.fused_layers", f"nothing is fused: {problem}", hint="leave it out")
    if config.fused_router and uses_kernels(config, model.device) and layers is not None:
        routers = fuse_routers(model, layers)
        done.append((f"{len(routers.names)} of {moe} routers", routers))
    if done:
        notes = (f"fused: {', '.join(count for count, _ in done)}", *notes)
    notes += tuple(note for _, each in done for note in each.notes)
    return Fused(routers, notes, tuple((each.kind.what, *each.names) for _, each in done))


def _agree(sums: Sums, reason: str) -> str:
    return agree(sums.collectives, reason, "a proof")
