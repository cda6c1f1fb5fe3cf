"""Lists the tensors in the safetensors files of a checkpoint folder, and checks that the files are whole.

Reads headers only, so a damaged folder is refused before any memory is taken. Knows the file format
(https://huggingface.co/docs/safetensors, "Format") and the shard index of `save_pretrained`; knows nothing of models.
Called by `loading.py`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from fdasync_transformers.weights.open_shards import OpenShards

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# the format's own bound on a header; a larger number shows a file of another format
_MAX_HEADER_NBYTES = 100_000_000
_DTYPE_NBYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
FLOATS = frozenset(name for name in _DTYPE_NBYTES if name.startswith(("F", "BF")))


class Layout(ABC):
    """A way to store a quantised tensor (`layouts`)."""

    @abstractmethod
    def join(self, key: str, stored: StoredTensor, table: Mapping[str, StoredTensor]) -> StoredTensor | None:
        """The tensor that a stored one makes with others of the table; None: it holds no values of this layout.

        Reads no tensor data. Raises CheckpointError naming a tensor that is missing or does not fit.
        """

    @abstractmethod
    def rows(self, shards: OpenShards, stored: StoredTensor, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        """Rows `first` to `last` (exclusive) of a joined tensor, in the dtype and on the device of `like`.

        Raises CheckpointError.
        """


class Quantized(NamedTuple):
    """The stored tensors that make a quantised one.

    Attributes:
        layout: which knows the arithmetic.
        parts: the stored tensors by what they are: "values", "scales" and what else the layout has. Values lie in the
            tensor's own shard, the others may lie elsewhere.
        block: rows and columns that share a scale; (0, 0) where the layout says it otherwise.
        bits: of one value.
    """

    layout: Layout
    parts: dict[str, StoredTensor]
    block: tuple[int, int] = (0, 0)
    bits: int = 8


class Converted(NamedTuple):
    """The stored tensors that the library makes one tensor of a model of.

    Attributes:
        rule: the library's `WeightConverter`.
        layer_name: the name that the rule goes by: of the first tensor that it makes.
        name: of the tensor meant, among the tensors that the rule makes.
        sources: (pattern of the rule, tensor) in the library's order.
        model: a conversion may look at it; it may be on the meta device.
    """

    rule: Any
    layer_name: str
    name: str
    sources: tuple[tuple[str, StoredTensor], ...]
    model: PreTrainedModel


class StoredTensor(NamedTuple):
    """One tensor on disk.

    Attributes:
        name: in the shard.
        file: the shard.
        dtype: the format's name; of a quantised tensor, as if it were stored dequantised.
        shape: of the tensor; of a quantised tensor, after dequantising.
        quantized: how to dequantise it; None: stored plain.
        converted: how to make it of others, which lie in `file` and maybe in other shards; None: stored as one.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    quantized: Quantized | None = None
    converted: Converted | None = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(str(path), "the file is missing") from None
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "is not a JSON object")
    return value


def read_tensor_table(folder: Path) -> dict[str, StoredTensor]:
    """Check all files of the folder; returns every tensor by its name on disk.

    Raises CheckpointError naming the file and its problem.
    """
    table: dict[str, StoredTensor] = {}
    for path, indexed in _shards(folder).items():
        held = _read_header(path)
        lost = sorted(indexed - held.keys())
        if lost:
            raise CheckpointError(str(path), f"lacks {_some(lost)}, which {INDEX_FILE} places there")
        for name, tensor in held.items():
            if name in table:
                raise CheckpointError(str(path), f"holds {name}, and so does {table[name].file.name}")
            table[name] = tensor
    return table


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Path of each shard, and the tensors that the index places in it."""
    index = folder / INDEX_FILE
    single = folder / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            pickles = sorted(folder.glob("*.bin"))
            problem = f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"
            if pickles:
                problem += f" ({pickles[0].name} is a pickle, which can run code: convert it to safetensors)"
            raise CheckpointError(str(folder), problem)
        return {single: set()}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(str(index), "has no weight_map from tensor names to file names")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        # a path out of the folder is no shard of this checkpoint
        if "/" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise CheckpointError(str(index), f"names {name!r}, which is no safetensors file of this folder")
        shards.setdefault(folder / name, set()).add(tensor)
    if single.exists() and shards.keys() != {single}:
        # the library would read the single file, and the other files may be the newer ones
        problem = f"holds {SINGLE_FILE}, and an {INDEX_FILE} that names other files: take away those that are not meant"
        raise CheckpointError(str(folder), problem)
    for path, names in shards.items():
        if not path.exists():
            raise CheckpointError(str(path), f"is missing; {INDEX_FILE} places {len(names)} tensors in it")
    return shards


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_NBYTES):
                problem = f"is truncated or no safetensors file: {size} bytes, header of {length}"
                raise CheckpointError(str(path), problem)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    try:
        header = json.loads(raw, object_pairs_hook=_each_name_once)
        header.pop("__metadata__", None)
        held = {}
        spans = []
        for name, entry in header.items():
            shape = tuple(int(n) for n in entry["shape"])
            first, last = entry["data_offsets"]
            if last - first != math.prod(shape) * _DTYPE_NBYTES[entry["dtype"]]:
                raise CheckpointError(str(path), f"the header gives {name} {last - first} bytes for shape {shape}")
            held[name] = StoredTensor(name, path, entry["dtype"], shape)
            spans.append((first, last, name))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(path), f"its header cannot be read: {type(error).__name__}: {error}") from None
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            problem = "bytes of another tensor" if first < end else "bytes of no tensor before it"
            raise CheckpointError(str(path), f"the header gives {name} {problem}: from {first} on, and not {end}")
        end = last
    if size != 8 + length + end:
        problem = "is truncated" if size < 8 + length + end else "has bytes past its last tensor"
        raise CheckpointError(str(path), f"{problem}: {size} bytes, {8 + length + end} by its header")
    return held


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return once


def _some(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
