"""Makes a checkpoint a model that is ready to be served: builds, refuses, fills, mends, probes and checks it.

In this order, so that a model that cannot be served is refused before its weights take memory. Knows the library's
models; knows no blocks and no requests. Called by `opened_runner.py`.
"""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fdasync.errors import ConfigError, FdasyncError, UnsupportedModel
from fdasync_transformers.execution.device_step import DeviceStepModel
from fdasync_transformers.execution.graphs import decode_rows
from fdasync_transformers.execution.step import StepModel
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.indexers import find_indexers
from fdasync_transformers.model.kept.linears import make_plain
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.model.moe_layers import find_experts, find_moe_layers
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.model.recurrent.probe import find_state, refuse_forgetful
from fdasync_transformers.model.recurrent.states import versions_of
from fdasync_transformers.model.refusals import refuse_unservable
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.parallel.slices import Slices
from fdasync_transformers.parallel.sums import Sums
from fdasync_transformers.parallel.whole import agree
from fdasync_transformers.start import indexed, selfcheck
from fdasync_transformers.start.fuse import fuse, set_plain_experts
from fdasync_transformers.start.mtp import attention_of_mtp, count_mtp, mtp_layout, mtp_note
from fdasync_transformers.start.recurrent import refuse_cut, refuse_undone
from fdasync_transformers.start.runner_config import uses_kernels
from fdasync_transformers.start.same_bits import check_bits
from fdasync_transformers.start.short_reach import PLAYED_TOKENS, short_reach, sizes_of
from fdasync_transformers.start.stored import keep_stored
from fdasync_transformers.weights import loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.execution.model_memory import ModelMemory
    from fdasync_transformers.fused.routers import FusedRouters
    from fdasync_transformers.model.kv import LayerSpec
    from fdasync_transformers.model.moe_layers import MoELayers
    from fdasync_transformers.model.recurrent.states import StateLayout
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.weights.names import Names

    MakeLayout = Callable[[Sequence[LayerSpec]], KVLayout]

# tokens of the self-check beyond the largest size that it crosses
_BEYOND_TOKENS = 24


@dataclass(frozen=True)
class Opened:
    """A model that is ready to be served.

    Attributes:
        step_model: has the model.
        live: which rows of its running pass are a sequence's, for fused modules.
        names: of its checkpoints.
        experts: its MoE layers; None: it has none, or none that the runner can read where routing is off.
        captured: its MoE layers whose routing is captured; None: there are none.
        routers: its fused routers; None where none were tried.
        max_context_tokens: of the model and the limits.
        block_tokens: asked for, or chosen.
        shares_blocks: every rank of the group holds whole KV blocks.
        notes: for people.
    """

    step_model: StepModel
    live: LiveRows
    names: Names
    experts: MoELayers | None
    captured: MoELayers | None
    routers: FusedRouters | None
    max_context_tokens: int
    block_tokens: int
    shares_blocks: bool
    notes: tuple[str, ...]


def open_model(
    checkpoint: loading.Checkpoint,
    config: TransformersConfig,
    limits: RunnerLimits,
    memory: ModelMemory,
    collectives: Collectives | None = None,
) -> Opened:
    """Load a checkpoint (or draw its weights) into memory, and prove that it is computed right.

    With `collectives`, this process loads its parts of it. All ranks make the same passes
    in the same order.

    Raises CheckpointError, UnsupportedModel and ConfigError.
    """
    device, mtp_layers = memory.device, count_mtp(checkpoint, config)
    model = loading.build(checkpoint, config.dtype, mtp_layers)
    kind = checkpoint.model_type
    refuse_unservable(model)
    if find_mixers(model):
        refuse_undone(model, kind, config, limits, device)
    if find_indexers(model):
        indexed.refuse_undone(kind, config, limits, device)
    notes = [*checkpoint.architecture.notes, *check_routing(model, limits)]
    names = loading.names_of(checkpoint, model)
    make_layout = _layout_of(model)
    if mtp_layers:
        with library_code(kind, "the probe of its multi-token prediction layers"):
            make_layout = mtp_layout(model, config, limits, device)
    sums = None
    if limits.sum_slices > 1:
        with library_code(kind, "cutting its sums into slices"):
            slices = Slices(copy.deepcopy(model), limits.sum_slices, latent=config.latent_mla)
    if collectives is not None:
        with library_code(kind, "cutting it for ranks"):
            further = attention_of_mtp(model, config)
            sharded = Sharded(model, collectives.rank, collectives.ranks, latent=config.latent_mla, further=further)
        refuse_cut(model, kind, sharded.cuts)
        names.cuts = sharded.cuts
        make_layout = partial(sharded.layout, make=make_layout)
    kept = keep_stored(model, checkpoint, config, names)
    make = memory.maker(model)
    if config.weights == "random":
        loading.fill_random(names, device, make)
        if kept:
            notes.append("drawn weights that stay as stored are quantised as the checkpoint's config says")
    else:
        notes += loading.fill(model, checkpoint, names, device, make)
    if collectives is not None:
        if limits.sum_slices == 1:
            sums = sharded.attach(model, collectives)
        notes.append(f"rank {collectives.rank} of {collectives.ranks}: {len(sharded.cuts)} tensors are cut")
    if limits.sum_slices > 1:
        slices.attach(model, collectives, kernels=uses_kernels(config, device))
        if collectives is not None:
            # what is fused finds nothing to sum, and the ranks agree on it
            sums = Sums(collectives, {})
        notes.append(f"sums that ranks share have {limits.sum_slices} slices")
    with library_code(kind, "a plain pass of one token"):
        experts = _experts_of(model, limits)
    set_plain_experts(model, config, experts, limits)
    with library_code(kind, "the probe of its recurrent layers"):
        state = find_state(model)
        refuse_forgetful(model, make_plain)
    if state is not None:
        notes.append(state_note(state, limits.speculation))
    max_context = max_context_of(model, limits)
    live = LiveRows()
    make_step = partial(make_step_model, config, limits, live, collectives, state)

    def settle() -> tuple[families.Mends, FusedRouters | None]:
        with library_code(kind, "mending it"):
            mends = families.mend(model)
        with library_code(kind, "fusing it"):
            fused = fuse(model, config, experts, live, limits, sums)
        notes.extend(fused.notes)
        return mends, fused.routers

    mends, routers, layout, checked = _settle(
        model, kind, config, limits, experts, max_context, make_step, make_layout, settle
    )
    max_context = min(max_context, mends.max_context_tokens or max_context)
    step_model = make_step(model, layout)
    notes += [*mends.notes, f"experts: {model.config._experts_implementation or 'own'}", *checked]
    notes += step_model.notes
    if mtp_layers:
        notes.append(mtp_note(model, layout))
    if step_model.indexers is not None:
        notes.append(indexed.index_note(model, layout))
    block_tokens = limits.block_tokens or step_model.layout.choose_block_tokens()
    return Opened(
        step_model=step_model,
        live=live,
        names=names,
        experts=experts,
        captured=None if limits.capture is False else experts,
        routers=routers,
        max_context_tokens=max_context,
        block_tokens=block_tokens,
        shares_blocks=collectives is not None and sharded.shares_blocks,
        notes=tuple(notes),
    )


def make_step_model(
    config: TransformersConfig,
    limits: RunnerLimits,
    live: LiveRows,
    collectives: Collectives | None,
    state: StateLayout | None,
    model: PreTrainedModel,
    layout: KVLayout,
) -> StepModel:
    """It has kernels on GPUs, torch's attention on CPUs, unless configured otherwise. Raises ConfigError."""
    fixed = limits.numerics == "fixed"
    if not uses_kernels(config, model.device):
        if model.device.type == "cuda":
            raise ConfigError("runner_config.kernels", '"torch" is for CPUs: it waits for a GPU at every step')
        return StepModel(model, layout, fixed=fixed, state=state)
    if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("runner_config.kernels", '"triton" on a CPU needs the environment TRITON_INTERPRET=1')
    return DeviceStepModel(
        model, layout, decode_rows(limits), live=live, fixed=fixed, most_run=1 + limits.speculation,
        state=state, agree=partial(agree, collectives, label="a proof"),
    )  # fmt: skip


def state_note(state: StateLayout, speculation: int) -> str:
    """What a sequence's recurrent state takes, for people."""
    versions = versions_of(speculation)
    times = f", {versions} times for its drafts" if versions > 1 else ""
    return f"recurrent state of {state.nbytes:,} bytes a sequence{times}, and as much in each snapshot"


def _layout_of(model: PreTrainedModel) -> MakeLayout:
    return lambda layers: KVLayout(tuple(layers), model.dtype)


def _settle(
    model: PreTrainedModel,
    kind: str,
    config: TransformersConfig,
    limits: RunnerLimits,
    experts: MoELayers | None,
    max_context: int,
    make_step_model: Callable[[PreTrainedModel, KVLayout], StepModel],
    make_layout: MakeLayout,
    settle: Callable[[], tuple[families.Mends, FusedRouters | None]],
) -> tuple[families.Mends, FusedRouters | None, KVLayout, tuple[str, ...]]:
    """Mend and fuse the model (`settle`), check it with short reaches, and find its layers as they are."""
    if not config.self_check:
        with library_code(kind, "the probe of its attention"):
            mends, routers = settle()
            return mends, routers, make_layout(_layers(model, config, mends)), ()
    with short_reach(model) as notes:
        longest = max((size + _BEYOND_TOKENS for size in sizes_of(model).values()), default=0)
        captured = None if limits.capture is False else experts
        with library_code(kind, "the plain passes of the self-check"):
            reference = selfcheck.plain_passes(
                model, captured, max_context, min(longest, PLAYED_TOKENS + _BEYOND_TOKENS)
            )
        with library_code(kind, "the probe of its attention"):
            mends, routers = settle()
            layers = _layers(model, config, mends)
        step_model = make_step_model(model, make_layout(layers))
        with library_code(kind, "the paged passes of the self-check"):
            block_tokens = limits.block_tokens or step_model.layout.choose_block_tokens()
            figures = [selfcheck.check(step_model, captured, routers, reference, block_tokens)]
            if limits.numerics == "fixed":
                figures.append(check_bits(step_model, reference, block_tokens))
    with library_code(kind, "the probe of its attention"):
        real = _layers(model, config, mends)
    if [layer.reach.kind for layer in real] != [layer.reach.kind for layer in layers]:
        raise UnsupportedModel(kind, "its attention layers have other masks with short windows than with its own")
    return mends, routers, make_layout(real), (*notes, *figures)


def _layers(model: PreTrainedModel, config: TransformersConfig, mends: families.Mends) -> tuple[LayerSpec, ...]:
    return probe.attention_layers(model, latent=config.latent_mla, query_scales=mends.query_scales)


def check_routing(model: PreTrainedModel, limits: RunnerLimits) -> tuple[str, ...]:
    """Find out before weights are loaded whether their routing can be recorded as asked. Returns what people should
    know.

    Raises UnsupportedModel for experts whose routing cannot be recorded, ConfigError for a dense model.
    """
    if limits.capture is False:
        return ()
    experts = find_experts(model)
    if limits.capture is True and not experts:
        raise ConfigError(
            "routing", f"{model.config.model_type} has no MoE layers", hint='set routing to "auto" or False'
        )
    return () if experts else ("no MoE layers: results have no routing",)


def _experts_of(model: PreTrainedModel, limits: RunnerLimits) -> MoELayers | None:
    try:
        return find_moe_layers(model)
    except UnsupportedModel:
        if limits.capture is not False:
            raise
        return None


def max_context_of(model: PreTrainedModel, limits: RunnerLimits) -> int:
    """Most tokens of a sequence, by the model and the limits. Raises UnsupportedModel."""
    own = getattr(model.config, "max_position_embeddings", None)
    if own is None or int(own) < 1:
        problem = "no max_position_embeddings" if own is None else f"max_position_embeddings {own}"
        raise UnsupportedModel(str(model.config.model_type), f"its config has {problem}")
    return min(int(own), limits.max_context_tokens or int(own))


@contextmanager
def library_code(kind: str, stage: str) -> Iterator[None]:
    """Within the context, errors of the library's code (and of ours around it) are UnsupportedModel, with the stage:
    they do not mean that a checkpoint is broken, as it was read and fits its config."""
    try:
        yield
    except (FdasyncError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise errors of many types
        raise UnsupportedModel(kind, f"{stage} fails: {type(error).__name__}: {error}") from error
