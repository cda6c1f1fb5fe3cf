"""What names weights and models: the digest of a model's tensors, and of the facts that its KV depends on.

Knows tensors and configs; knows no folders. Called by `update.py`, `named.py` and `runner.py`.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from fdasync.errors import WeightsBroken
from fdasync.request import WeightsFingerprint
from fdasync_transformers.model.kept.kept import Kept, logical_state
from fdasync_transformers.parallel.whole import whole_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from fdasync.request import Numerics
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.parallel.cuts import Cut
    from fdasync_transformers.weights.names import Names

# keys of config.json that KV does not depend on; all others count, known or not
_NOT_IN_FINGERPRINT = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label"}
    | {"is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"pad_token_id", "problem_type", "return_dict", "router_aux_loss_coef", "transformers_version", "use_cache"}
    | {"initializer_range", "_commit_hash", "experts_implementation", "_experts_implementation", "torch_dtype"}
)
# of the page-locked buffer through which a GPU's tensors are hashed
_STAGED_NBYTES = 64 << 20
#: the weights id of weights that `draw` drew
DRAWN_ID = "0" * 32
#: the version of this package's own arithmetic under fixed numerics. Raise it with each change after which some model
#: may have other bits on some device: another tile, another place where parts are cut or joined, another rounding,
#: another operation that is computed in its own way, in `fixed` or in `fdasync_kernels`
ORDER_OF_SUMS = 3


def weights_id(model: PreTrainedModel) -> str:
    """The digest of a model's tensors (docs/design.md, rule 1).

    A tied tensor counts under each of its names, so the id does not depend on which tensors share memory. A tensor that
    is kept as stored counts dequantised, so it does not depend on that either.
    """
    return digest(sorted(logical_state(model).items()))


def whole_weights_id(names: Names, collectives: Collectives | None) -> str:
    """As `weights_id`, of the model that the ranks of a group hold parts of; every rank gets it."""
    found = whole_fingerprint(names, collectives, with_tensors=False).weights_id
    return found if collectives is None else collectives.tell(found.encode(), "weights id")[0].decode()


def whole_fingerprint(names: Names, collectives: Collectives | None, with_tensors: bool) -> WeightsFingerprint:
    """The fingerprint of a model, or of a model whose parts the ranks of a group hold: then rank 0's result counts.

    Args:
        names: of the model's checkpoints.
        collectives: of the group; None: this process holds all.
    """
    state = logical_state(names.model)
    if collectives is not None:
        _check_alike(state, names.cuts, collectives)
    tensors = whole_tensors(state, names.cuts, collectives)
    if collectives is None or not collectives.rank:
        return fingerprint_of(tensors, with_tensors)
    for _ in tensors:
        pass
    return fingerprint_of((), with_tensors)


def _check_alike(state: Mapping[str, torch.Tensor | Kept], cuts: Mapping[str, Cut], collectives: Collectives) -> None:
    """Raise WeightsBroken on all ranks unless ranks that hold the same tensor, or the same part, have the same bytes.

    Ranks read their parts one by one: a folder may have changed meanwhile, and rank 0's copies alone are gathered.
    """
    whole, shared = [], []
    for name, tensor in sorted(state.items()):
        cut = cuts.get(name)
        if cut is None:
            whole.append((name, tensor))
        elif cut.count < collectives.ranks:
            shared.append((f"{cut.index} of {name}", tensor))
    held = xxhash.xxh3_128("\n".join(name for name, _ in shared).encode()).hexdigest()
    mine = (digest(whole), held, digest(shared))
    told = [
        message.decode().split() for message in collectives.tell(" ".join(mine).encode(), "tensors held by several")
    ]
    for rank, (of_whole, of_held, of_shared) in enumerate(told):
        alike = next(other for other in told if other[1] == of_held)
        if of_whole != told[0][0] or of_shared != alike[2]:
            problem = f"rank {rank} of {len(told)} has other weights than the ranks before it"
            raise WeightsBroken(f"{problem}: the folder changed while it was read")


def digest(tensors: Iterable[tuple[str, torch.Tensor | Kept]], each: dict[str, str] | None = None) -> str:
    """XXH3-128 over name, dtype, shape and bytes of every tensor, in the order in which they come; hex.

    Args:
        each: gets the digest of every tensor alone, by name; None: they are not computed.
    """
    made = xxhash.xxh3_128()
    staging: list[torch.Tensor] = []
    for name, tensor in tensors:
        hashes = [made] if each is None else [made, xxhash.xxh3_128()]
        for one in hashes:
            one.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        for data in _bytes_of(tensor.detach(), staging):
            for one in hashes:
                one.update(data)
        if each is not None:
            each[name] = hashes[1].hexdigest()
    return made.hexdigest()


def fingerprint_of(tensors: Iterable[tuple[str, torch.Tensor | Kept]], with_tensors: bool) -> WeightsFingerprint:
    """The fingerprint of a model's tensors, which come by name."""
    each: dict[str, str] | None = {} if with_tensors else None
    return WeightsFingerprint(digest(tensors, each), each or {})


def _bytes_of(tensor: torch.Tensor | Kept, staging: list[torch.Tensor]) -> Iterator[memoryview]:
    """The tensor's bytes, in pieces; each is valid until the next. From a GPU they come through a page-locked buffer,
    kept in `staging`: copies to other memory take several times as long."""
    if isinstance(tensor, Kept):
        for piece in [tensor[:]] if tensor.dim() == 2 else map(tensor.__getitem__, range(len(tensor))):
            yield from _bytes_of(piece, staging)
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cuda":
        yield _view(flat)
        return
    if not staging:
        staging.append(torch.empty(_STAGED_NBYTES, dtype=torch.uint8, pin_memory=True))
    for first in range(0, len(flat), _STAGED_NBYTES):
        piece = flat[first : first + _STAGED_NBYTES]
        held = staging[0][: len(piece)]
        held.copy_(piece)  # blocking: at start-up and between steps, in a process of its own
        yield _view(held)


def _view(flat: torch.Tensor) -> memoryview:
    data: Any = flat.numpy()
    return memoryview(data)


def fingerprint(model: PreTrainedModel, numerics: Numerics = "default") -> str:
    """Hex digest of the facts beside the weights that KV depends on: the config, without keys known not to matter.

    With fixed numerics, what chooses kernels too: blocks that another device or another version computed have other
    bits, and are not taken.
    """
    facts = config_facts(model.config)
    facts["compute_dtype"] = str(model.dtype)
    if numerics == "fixed":
        facts["computed_by"] = _computed_by(model.device)
    return xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _computed_by(device: torch.device) -> dict[str, str | int]:
    """What chooses the order of sums."""
    packages = ("torch", "transformers", *(("triton",) if device.type == "cuda" else ()))
    facts: dict[str, str | int] = {name: version(name) for name in packages}
    return facts | {"device": _device_kind(device), "order": ORDER_OF_SUMS}


def _device_kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def config_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of a config that KV depends on. Call it for a checkpoint's config before loading, which changes some."""
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_IN_FINGERPRINT}
