"""A folder of the tensors that changed since other weights: a manifest, and files of safetensors.

`delta.json` names the weights that the tensors are applied to, each tensor with its file and its checksum, and the
weights that come of it. So nothing of a folder for other weights is used, and a torn file is seen before the first byte
changes. Tensors have names of a checkpoint or of the model, shapes and floating dtypes as an update from memory takes
them. Read by `update.py`; written by trainers with `write_delta`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import xxhash
from safetensors.torch import save_file

from fdasync.errors import CheckpointError
from fdasync.request import TensorMeta
from fdasync_transformers.weights.deltas.tensors import dtype_name, own_tensors
from fdasync_transformers.weights.open_shards import OpenShards

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

MANIFEST = "delta.json"
FORMAT = "fdasync.delta/1"
_FILE = "delta-{:05}.safetensors"
# of one file
_FILE_NBYTES = 4 << 30
_MANIFEST_NBYTES = 64 << 20

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class DeltaTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a delta.

    Attributes:
        file: of the folder.
        xxh3: XXH3-128 of its bytes.
    """

    file: str
    xxh3: Digest


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `delta.json` says.

    Attributes:
        format: "fdasync.delta/1".
        base: fingerprint of the weights that the tensors are applied to (`WeightsFingerprint.weights_id`).
        result: of the weights that come of it.
        tensors: by name.
    """

    format: str
    base: Digest
    result: Digest
    tensors: dict[str, DeltaTensor]


def is_delta(path: str) -> bool:
    """Whether a folder is a delta, and no checkpoint."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: str) -> Manifest:
    """Raises CheckpointError naming the file and what is wrong with it."""
    file = Path(path) / MANIFEST
    try:
        if file.stat().st_size > _MANIFEST_NBYTES:
            raise CheckpointError(str(file), f"is larger than {_MANIFEST_NBYTES} bytes")
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(str(file), f"is no manifest of a delta: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(str(file), f"has the format {manifest.format!r:.100}, not {FORMAT}")
    if not manifest.tensors:
        raise CheckpointError(str(file), "names no tensors")
    for name, tensor in manifest.tensors.items():
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", tensor.file):
            raise CheckpointError(str(file), f"{name} lies in {tensor.file!r:.100}, which is no file of the folder")
    return manifest


def checked_metas(path: str, manifest: Manifest) -> list[TensorMeta]:
    """Read all tensors and compare their checksums; returns what they are, in the manifest's order.

    Raises CheckpointError for a tensor that is missing, that the manifest leaves out, or that has other bytes.
    """
    metas = []
    for name, tensor in tensors_of(path, manifest):
        metas.append(TensorMeta(name, dtype_name(name, tensor), tuple(tensor.shape)))
    for file in sorted({Path(path) / tensor.file for tensor in manifest.tensors.values()}):
        with OpenShards() as shards:
            if left := sorted(set(shards.names(file)) - manifest.tensors.keys()):
                raise CheckpointError(str(file), f"holds {left[0]}, which {MANIFEST} does not name")
    return metas


def tensors_of(path: str, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by name, in the manifest's order, once its bytes were compared. Raises CheckpointError."""
    with OpenShards() as shards:
        for name, one in manifest.tensors.items():
            file = Path(path) / one.file
            tensor = shards.tensor(file, name)
            if (found := _digest(tensor)) != one.xxh3:
                raise CheckpointError(str(file), f"{name} has the checksum {found}, {MANIFEST} says {one.xxh3}")
            yield name, tensor


def write_delta(
    folder: str | os.PathLike[str],
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    base: str,
    result: str,
) -> None:
    """Write tensors as a delta; its manifest appears last, so that a folder with one is whole.

        write_delta(folder, changed, base=old.weights_id, result=weights_fingerprint(model, dtype=...).weights_id)

    Args:
        folder: made, where it is not there.
        source: the tensors that changed, under names as an update from memory takes them.
        base, result: fingerprints of the weights before and after, as the engine has them.

    Raises WeightsRejected for a tensor without data, or of a dtype that no runner takes; OSError.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    entries: dict[str, DeltaTensor] = {}
    held: dict[str, torch.Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal files
        save_file(held, root / _FILE.format(files), {"format": "pt"})
        files += 1
        held.clear()

    for name, tensor in own_tensors(source):
        dtype_name(name, tensor)
        whole = tensor.detach().cpu().contiguous()
        if held and sum(one.nbytes for one in held.values()) + whole.nbytes > _FILE_NBYTES:
            flush()
        entries[name] = DeltaTensor(_FILE.format(files), _digest(whole))
        held[name] = whole
    if held:
        flush()
    manifest = Manifest(FORMAT, base, result, entries)
    unfinished = root / f"{MANIFEST}.part"
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    unfinished.rename(root / MANIFEST)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, flat."""
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(bytes_of(tensor)).hexdigest()
