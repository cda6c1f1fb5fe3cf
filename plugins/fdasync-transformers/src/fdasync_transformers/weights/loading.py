"""Loads a checkpoint folder into a model in memory: config.json and safetensors, nothing else.

The model is built on the meta device and its tensors are streamed one by one, so the weights are in memory once;
quantised ones are dequantised on the way. Names, shapes and file sizes are checked before memory is taken. Runs no code
of the checkpoint (no remote code, no pickle) and never calls the hub. Knows nothing of KV caches or steps. Called by
`opened_runner.py` and `update.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import build_glob_alternation

from fdasync.errors import CheckpointError, ConfigError
from fdasync_transformers.model.kept.kept import Kept, kept_forms, logical_state
from fdasync_transformers.mtp.head import attach
from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.weights.architecture import read_architecture
from fdasync_transformers.weights.kept.files import form_of, refuse_remade
from fdasync_transformers.weights.mapping import destination, place
from fdasync_transformers.weights.names import Names
from fdasync_transformers.weights.open_shards import OpenShards
from fdasync_transformers.weights.placement import Placement
from fdasync_transformers.weights.quantized import plain_table, read_scheme
from fdasync_transformers.weights.reading import copy_stored
from fdasync_transformers.weights.shards import StoredTensor, read_json, read_tensor_table
from fdasync_transformers.weights.ties import tied_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from fdasync_transformers.model.kept.forms import Form
    from fdasync_transformers.parallel.cuts import Cut
    from fdasync_transformers.weights.architecture import Architecture
    from fdasync_transformers.weights.mapping import Placed
    from fdasync_transformers.weights.quantized import Scheme

# ends of names of tensors that only quantised checkpoints have
_OF_QUANTISED = ("weight_scale_inv", "_proj_blocks", ".qweight", ".weight_packed")
# a model of more layers is built for minutes, without memory too
_MOST_LAYERS = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# served only where it is asked for by name
_ASKED_DTYPES = {**_DTYPES, "float64": torch.float64}
_STORED_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was checked to be whole.

    Attributes:
        folder: its path.
        architecture: what is built.
        tensors: on disk, by name; empty where only the config was read.
        scheme: how it is quantised; None: it is plain.
    """

    folder: Path
    architecture: Architecture
    tensors: Mapping[str, StoredTensor]
    scheme: Scheme | None = None

    @property
    def config(self) -> PreTrainedConfig:
        """The config of the language model, without its words on quantisation."""
        return self.architecture.config

    @property
    def model_type(self) -> str:
        """The library's name of the family."""
        return str(self.config.model_type)


def read_checkpoint(folder: str, *, with_tensors: bool = True) -> Checkpoint:
    """Read and check a folder without loading it; its config alone without `with_tensors`.

    Raises CheckpointError naming the file and its problem; UnsupportedModel for a type that the library does not know,
    that is no causal language model, or whose quantisation this loader does not know.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(folder, "is no folder" if path.exists() else "the folder does not exist")
    config_file = path / "config.json"
    raw = read_json(config_file)
    scheme = read_scheme(raw, config_file)
    architecture = read_architecture(raw, config_file)
    tensors = read_tensor_table(path) if with_tensors else {}
    packed = next((name for name in tensors if name.endswith(_OF_QUANTISED)), None)
    if scheme is None and packed is not None:
        problem = f"has no quantization_config, and the folder holds {packed}, which is part of a quantised tensor"
        raise CheckpointError(str(config_file), problem)
    return Checkpoint(path, architecture, plain_table(tensors, scheme) if scheme else tensors, scheme)


def build(checkpoint: Checkpoint, dtype: str, mtp_layers: int = 0) -> PreTrainedModel:
    """The model on the meta device, in its final dtypes: it has shapes and takes no memory. `dtype` "auto" is the
    checkpoint's own (bfloat16 if it is quantised and names none). With so many multi-token prediction layers.

    Raises CheckpointError for a config whose sizes do not fit together, ConfigError for a dtype that is not served,
    UnsupportedModel where the library's multi-token prediction layer does not fit the family.
    """
    chosen = choose_dtype(checkpoint, dtype)
    layers: Any = getattr(checkpoint.config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise CheckpointError(str(checkpoint.folder / "config.json"), f"asks for {layers:,} layers")
    model = _on_meta(checkpoint, checkpoint.config, checkpoint.architecture.model_class, chosen)
    if mtp_layers:
        attach(model, mtp_layers, chosen)
    keep_float32(model, chosen)
    return model


def names_of(checkpoint: Checkpoint, model: PreTrainedModel) -> Names:
    """How the checkpoint's tensors are named. Raises CheckpointError."""
    whole = checkpoint.architecture.whole
    return Names(model, None if whole is None else _on_meta(checkpoint, *whole, model.dtype))


def _on_meta(
    checkpoint: Checkpoint, config: PreTrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype
) -> PreTrainedModel:
    library: Any = model_class
    try:
        with torch.device("meta"):
            model: PreTrainedModel = library._from_config(config, dtype=dtype)
    except Exception as error:  # models raise errors of many types for sizes that do not fit together
        raise CheckpointError(
            str(checkpoint.folder / "config.json"), f"no {config.model_type} can be built from it: {error}"
        ) from error
    return model


def load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    """`build` and `fill`. Raises as they do."""
    model = build(checkpoint, dtype)
    fill(model, checkpoint, names_of(checkpoint, model), device)
    return model


def fill(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    names: Names,
    device: torch.device,
    make: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[str, ...]:
    """Give a model of `build` its weights on `device`, in evaluation mode, without gradients. Returns notes for people.

    Parts that the library keeps in float32 stay float32. Tensors that the config ties are one, unless the folder has
    different values for them: the library then leaves them apart, each with memory of its own, and says so in its log.
    `make` makes the memory of each tensor on the device; None: torch does.
    Raises CheckpointError and UnsupportedModel before memory is taken, ConfigError where a tensor is to be kept as
    stored and is stored otherwise, CheckpointError for a file that fails while it is read.
    """
    placed = place(names, checkpoint.tensors, checkpoint.folder)
    refuse_remade(placed.tensors, placed.placements, kept_forms(model))
    # this gives tied tensors memory of their own
    _to_empty(model, device, make)
    stream(names, placed.tensors, placed.placements)
    missing = names.shapes.keys() - {placement.target for placement in placed.placements.values()}
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    _finish(model, missing - {name for names in tied_groups(model) for name in names})
    return placed_notes(checkpoint, placed, model.dtype, kept_forms(model))


def draw(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    """`build` and `fill_random`. Raises as `build` does."""
    model = build(checkpoint, dtype)
    fill_random(names_of(checkpoint, model), device)
    return model


def _to_empty(
    model: PreTrainedModel, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    if make is None:
        model.to_empty(device=device)
    else:
        # what `to_empty` does with memory of torch's own
        library: Any = model
        library._apply(make)


def fill_random(names: Names, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """Give a model of `build` random weights, drawn on the device: the same on every device of its kind.

    A rank of a group draws whole tensors, one at a time, and keeps its parts. `make`: as in `fill`.
    """
    model = names.model
    _to_empty(model, device, make)
    model.tie_weights()
    draw_weights(names)
    _finish(model)


def draw_weights(names: Names) -> None:
    """Draw the weights of a model that has memory for them; the same at every call."""
    model = names.model
    device = model.device
    random = torch.Generator(device).manual_seed(0)
    for name, tensor in logical_state(model).items():
        if isinstance(tensor, Kept):
            # the values that plain weights would have, quantised
            shape = tuple(names.shapes[name].shape)
            drawn = torch.empty(shape, dtype=tensor.dtype, device=device).normal_(0.0, 0.02, generator=random)
            target: Any = destination(Placement(name), tensor, names.cuts.get(name))
            for first in range(0, len(drawn), target.step):
                target.put(first, drawn[first : first + target.step])
        elif not tensor.is_floating_point():
            # tables of ids: 0 is an id everywhere
            tensor.zero_()
        elif cut := names.cuts.get(name) if tensor.dim() > 1 else None:
            shape = cut.whole_shape(tuple(tensor.shape))
            drawn = torch.empty(shape, dtype=tensor.dtype, device=device).normal_(0.0, 0.02, generator=random)
            Target(tensor, shape, cut).put(0, drawn)
        elif tensor.dim() > 1:
            tensor.normal_(0.0, 0.02, generator=random)
        else:
            # weights of norms are 1, biases 0
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _finish(model: PreTrainedModel, missing: Collection[str] = ()) -> None:
    _fill_buffers(model, missing)
    model.config.output_router_logits = False
    model.requires_grad_(False)
    model.train(False)


def stream(names: Names, tensors: Mapping[str, StoredTensor], placements: Mapping[str, Placement]) -> None:
    """Copy the stored tensors into the model's own, in place. Raises CheckpointError naming the file."""
    _read_into(logical_state(names.model), names.cuts, tensors, placements)


def assemble(
    tensor: torch.Tensor,
    tensors: Mapping[str, StoredTensor],
    placements: Mapping[str, Placement],
    form: Form | None = None,
) -> torch.Tensor | Kept:
    """What `stream` would make of one of the model's whole tensors, in host memory of its own. `tensor` may be on the
    meta device. `placements`: of the stored tensors that go there. `form`: in which the model keeps it. Raises
    CheckpointError naming the file."""
    made: torch.Tensor | Kept
    made = torch.empty(tensor.shape, dtype=tensor.dtype) if form is None else Kept.empty(form, tensor.shape, "cpu")
    _read_into({placement.target: made for placement in placements.values()}, {}, tensors, placements)
    return made


def _read_into(
    targets: Mapping[str, torch.Tensor | Kept],
    cuts: Mapping[str, Cut],
    tensors: Mapping[str, StoredTensor],
    placements: Mapping[str, Placement],
) -> None:
    by_file: dict[Path, list[str]] = {}
    for key in placements:
        by_file.setdefault(tensors[key].file, []).append(key)
    for keys in by_file.values():
        # scales may lie in another shard than their values: it is open for that long
        with OpenShards() as shards:
            for key in keys:
                where = placements[key]
                target = destination(where, targets[where.target], cuts.get(where.target))
                copy_stored(shards, tensors[key], target)


def placed_notes(
    checkpoint: Checkpoint, placed: Placed, dtype: torch.dtype, kept: Mapping[str, Form] | None = None
) -> tuple[str, ...]:
    """What happens to stored tensors on their way into a model of this dtype, for people. `kept`: forms of the model's
    tensors that are kept so, by name."""
    forms = kept or {}
    held = {key: forms[where.target] for key, where in placed.placements.items() if where.target in forms}
    stored = [tensor for key, tensor in placed.tensors.items() if key not in held]
    sources = [source for tensor in stored if tensor.converted for _, source in tensor.converted.sources]
    dequantized = sum(tensor.quantized is not None for tensor in (*stored, *sources))
    notes = []
    as_stored = sum(form_of(placed.tensors[key]) is form for key, form in held.items())
    if as_stored:
        notes.append(f"{next(iter(held.values())).name} kept as stored: {as_stored} tensors")
    if len(held) > as_stored:
        notes.append(f"{next(iter(held.values())).name} made of other forms: {len(held) - as_stored} tensors")
    if checkpoint.scheme is not None and dequantized:
        name = str(dtype).removeprefix("torch.")
        notes.append(f"{checkpoint.scheme.name} dequantised to {name}: {dequantized} tensors")
    if sources:
        notes.append(f"{len(sources)} tensors converted by the library")
    if placed.beside:
        notes.append(f"{placed.beside} tensors of vision or audio parts skipped")
    return tuple(notes)


def eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json. Raises CheckpointError on bad JSON."""
    path = checkpoint.folder / "generation_config.json"
    value: Any = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = getattr(checkpoint.config, "eos_token_id", None)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(str(path), f"eos_token_id {value!r} is neither an id nor a list of ids")
    return tuple(token for token in ids if token >= 0)


def choose_dtype(checkpoint: Checkpoint, dtype: str) -> torch.dtype:
    """As `build` chooses it; "auto" needs the checkpoint's tensors where its config names none. Raises ConfigError."""
    if dtype != "auto":
        return _ASKED_DTYPES[dtype]
    named: Any = checkpoint.config.dtype
    if named is None and checkpoint.scheme is not None:
        named = torch.bfloat16
    if named is None:
        floats = [tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype in _STORED_FLOATS]
        named = _STORED_FLOATS[floats[0]] if floats else torch.float32
    if named not in _DTYPES.values():
        raise ConfigError("dtype", f"the checkpoint asks for {named}", limit=tuple(_DTYPES), hint="set one of them")
    chosen: torch.dtype = named
    return chosen


def keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the parts float32 that the library keeps so, while the model is still on the meta device."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    kept = build_glob_alternation(list(plan))[0]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32)


def _fill_buffers(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Compute what no checkpoint has (rotary frequencies) and what this one may lack, as `from_pretrained` does."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor._is_hf_initialized = name not in missing  # `_init_weights` leaves such tensors alone
    library: Any = model
    lacking = {name.rpartition(".")[0] for name in missing}
    for path, module in model.named_modules():
        if module._non_persistent_buffers_set or path in lacking:
            library._init_weights(module)
