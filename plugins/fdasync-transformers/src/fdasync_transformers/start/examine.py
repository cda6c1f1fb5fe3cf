"""Looks at a checkpoint without loading it: would it be served, by which class, and how much memory would it take.

Builds the model on the meta device and finds the place of every stored tensor, as loading does, so that missing, left
over and misshapen tensors are told. The self-check needs weights, and waits for the start. Knows the library's
models; knows no engines. Called by `runner.py` for `fdasync doctor --model`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync.runner.report import ModelReport
from fdasync_transformers.capture.aux_producer import AuxSource
from fdasync_transformers.model import families, probe
from fdasync_transformers.model.indexers import find_indexers
from fdasync_transformers.model.kept.kept import kept_forms
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.model.moe_layers import find_experts, find_moe_layers, without_experts
from fdasync_transformers.model.recurrent.mixers import find_mixers
from fdasync_transformers.model.recurrent.probe import find_state
from fdasync_transformers.model.refusals import refuse_unservable
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.parallel.slices import Slices
from fdasync_transformers.start import indexed
from fdasync_transformers.start.aux_producers import make_aux
from fdasync_transformers.start.fuse import foresee_all
from fdasync_transformers.start.mtp import attention_of_mtp, count_mtp, mtp_layout, mtp_note
from fdasync_transformers.start.open_model import check_routing, library_code, max_context_of, state_note
from fdasync_transformers.start.recurrent import refuse_cut, refuse_undone
from fdasync_transformers.start.stored import keep_stored
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.kept.files import refuse_remade
from fdasync_transformers.weights.mapping import place
from fdasync_transformers.weights.quiet import no_warnings

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from transformers import PreTrainedModel

    from fdasync.runner.base import RunnerLimits
    from fdasync_transformers.model.moe_layers import MoELayers
    from fdasync_transformers.model.recurrent.states import StateLayout
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.weights.names import Names


@no_warnings()
def examine(config: TransformersConfig, limits: RunnerLimits, device: torch.device) -> ModelReport:
    """The report of a checkpoint folder. Blocks while it reads headers and builds the model without memory.

    Raises CheckpointError for a folder that is broken or not whole; ConfigError for a dtype that is not served, and for
    routing or other data that this model has not.
    """
    facts: dict[str, Any] = {"model": limits.model, "device": str(device), "device_nbytes": _memory_nbytes(device)}
    try:
        checkpoint = loading.read_checkpoint(limits.model, with_tensors=config.weights != "random")
    except UnsupportedModel as error:
        return ModelReport(**facts, family=error.model, served=False, reason=error.reason)
    facts |= {
        "family": checkpoint.model_type,
        "model_class": checkpoint.architecture.model_class.__name__,
        "stored_nbytes": _stored_nbytes(checkpoint),
    }
    notes = [*checkpoint.architecture.notes]
    try:
        mtp_layers = count_mtp(checkpoint, config)
        model = loading.build(checkpoint, config.dtype, mtp_layers)
        facts |= {
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights_nbytes": _weights_nbytes(model),
            "num_hidden_layers": len(families.decoder_layers(model)),
        }
        refuse_unservable(model)
        if find_mixers(model):
            refuse_undone(model, checkpoint.model_type, config, limits, device)
        if find_indexers(model):
            indexed.refuse_undone(checkpoint.model_type, config, limits, device)
        facts["max_context_tokens"] = max_context_of(model, limits)
        names = loading.names_of(checkpoint, model)
        placed, told = None, len(notes)
        if config.weights != "random":
            placed = place(names, checkpoint.tensors, checkpoint.folder)
            notes += loading.placed_notes(checkpoint, placed, model.dtype)
        untold = len(notes)
        shapes, experts, state = _shapes(model, checkpoint.model_type, config, limits, notes, device)
        facts |= shapes
        facts |= _parts(model, checkpoint.model_type, config, limits, names)
        if keep_stored(model, checkpoint, config, names):
            facts["weights_nbytes"] = _weights_nbytes(model)
            if placed is not None:
                forms = kept_forms(model)
                refuse_remade(placed.tensors, placed.placements, forms)
                notes[told:untold] = loading.placed_notes(checkpoint, placed, model.dtype, forms)
        with library_code(checkpoint.model_type, "looking for what kernels replace"):
            fused = foresee_all(model, config, experts, state, limits)
        facts["replaced"] = {each.kind.what: len(each.names) for each in fused if each.names}
        facts["kept"] = tuple(note for each in fused for note in each.notes)
    except UnsupportedModel as error:
        return ModelReport(**facts, served=False, reason=error.reason, notes=tuple(notes))
    return ModelReport(
        **facts,
        served=True,
        numerics=limits.numerics,
        sum_slices=limits.sum_slices,
        tensor_parallel=limits.tensor_parallel,
        notes=tuple(notes),
    )


def _shapes(
    model: PreTrainedModel,
    kind: str,
    config: TransformersConfig,
    limits: RunnerLimits,
    notes: list[str],
    device: torch.device,
) -> tuple[dict[str, Any], MoELayers | None, StateLayout | None]:
    """What one pass of one token on the meta device shows; MoE layers and recurrent state.

    Raises UnsupportedModel and ConfigError.
    """
    notes += check_routing(model, limits)
    try:
        find_experts(model)
    except UnsupportedModel:
        # served where routing is off; the library's code of such experts runs on no meta device, so sizes stay unknown
        return {}, None, None
    with library_code(kind, "a pass without weights"):
        mends = families.mend(model)
        experts = None if limits.capture is False else find_moe_layers(model, lambda: probe.run(model))
        with without_experts(model):
            layers = probe.attention_layers(model, latent=config.latent_mla, query_scales={}, reaches=False)
            state = find_state(model)
        layout = KVLayout(layers, model.dtype)
        if head_of(model) is not None:
            layout = mtp_layout(model, config, limits, device)(layers)
            notes.append(mtp_note(model, layout))
    found: dict[str, Any] = {"kv_token_nbytes": layout.token_nbytes}
    if state is not None:
        notes.append(state_note(state, limits.speculation))
        found["state_nbytes"] = state.nbytes
    if mends.max_context_tokens is not None:
        found["max_context_tokens"] = min(max_context_of(model, limits), mends.max_context_tokens)
    if experts is not None:
        found |= {
            "moe_layers": len(experts.ids),
            "num_experts": experts.num_experts,
            "top_k": max(experts.top_k),
        }
    found["aux_token_nbytes"] = make_aux(
        config.aux, AuxSource(model, experts), fixed=limits.numerics == "fixed"
    ).token_nbytes
    return found, experts, state


def _parts(
    model: PreTrainedModel, kind: str, config: TransformersConfig, limits: RunnerLimits, names: Names
) -> dict[str, Any]:
    """Cut the model for the first rank; the sizes of its parts, where there are several. Raises UnsupportedModel, also
    for sizes that do not divide: they are the model's."""
    try:
        if limits.sum_slices > 1:
            with library_code(kind, "cutting its sums into slices"):
                Slices(copy.deepcopy(model), limits.sum_slices, latent=config.latent_mla)
        if limits.tensor_parallel == 1:
            return {}
        with library_code(kind, "cutting it for ranks"):
            further = attention_of_mtp(model, config)
            sharded = Sharded(model, limits.rank, limits.tensor_parallel, latent=config.latent_mla, further=further)
            refuse_cut(model, kind, sharded.cuts)
    except ConfigError as error:
        raise UnsupportedModel(kind, str(error)) from error
    names.cuts = sharded.cuts
    return {"weights_nbytes": _weights_nbytes(model), "kv_token_nbytes": sharded.held_token_nbytes}


def _stored_nbytes(checkpoint: loading.Checkpoint) -> int:
    files: set[Path] = {stored.file for stored in checkpoint.tensors.values()}
    return sum(file.stat().st_size for file in files)


def _weights_nbytes(model: PreTrainedModel) -> int:
    """Bytes of the tensors that take memory of their own: a tied tensor counts once."""
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if name not in tied)


def _memory_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return 0
