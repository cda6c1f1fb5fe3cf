"""Sources of new weights, checked: a folder, tensors in memory, tensors of a group. Checks all but their content.

Called by `weights.py` and by `pd`, whose instances and routers take the same calls. Knows no runner's weights.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import BadInput
from fdasync.request import GroupTensors, WeightsGroup
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from fdasync.request import WeightSource

ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
#: a bucket is held twice in memory
MOST_BUCKET_NBYTES = 4 << 30
_MAX_NAME_CHARS = 256
_MOST_RANKS = 1 << 16
_MOST_TIMEOUT_S = 3600.0
# formats of buffers, as `struct` names them: raw bytes fit every dtype, others fit dtypes of their kind and size
_RAW_FORMATS = "Bbc"
_SIGNED, _UNSIGNED, _FLOAT = "bhilqn", "BHILQN", "efd"
_FORMATS = {
    "bool": "?", "uint8": _UNSIGNED, "uint16": _UNSIGNED, "uint32": _UNSIGNED, "uint64": _UNSIGNED, "int8": _SIGNED,
    "int16": _SIGNED, "int32": _SIGNED, "int64": _SIGNED, "float16": _FLOAT, "float32": _FLOAT, "float64": _FLOAT,
    # no format names these dtypes: their buffers hold integers of their size
    "bfloat16": _SIGNED + _UNSIGNED, "float8_e4m3fn": _SIGNED + _UNSIGNED, "float8_e5m2": _SIGNED + _UNSIGNED,
}  # fmt: skip


def folder_of(source: WeightSource) -> str | None:
    """The path of a folder; None for another kind of source. Raises BadInput for a text that cannot be a path."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    path: Any = os.fspath(source)
    if not isinstance(path, str) or not path or "\0" in path or not _is_text(path):
        raise BadInput("source", f"{source!r} is no folder")
    return path


def tensors_of(source: WeightSource) -> list[tuple[TensorMeta, memoryview]]:
    """Each tensor's description and its bytes, which stay the caller's. Raises BadInput naming the tensor, or for an
    object that is no source."""
    tensors: Any = source
    if not isinstance(tensors, Sequence) or isinstance(tensors, (bytes, bytearray, memoryview)):
        raise BadInput("source", f"{type(source).__name__} is neither a folder nor a sequence of tensors")
    checked = [_tensor_of(number, entry) for number, entry in enumerate(tensors)]
    if not checked:
        raise BadInput("source", "holds no tensors")
    return checked


def group_tensors_of(source: WeightSource, known: tuple[TensorMeta, ...] = ()) -> GroupTensors | None:
    """Tensors that a group brings; None for another kind of source. Raises BadInput naming the field.

    Args:
        known: descriptions that were checked before: equal ones are replaced by these, and neither checked nor told to
            a worker again. There are thousands, and between GPUs their bytes take less time.
    """
    if not isinstance(source, GroupTensors):
        return None
    _check_name("source.group", source.group)
    if not source.tensors:
        raise BadInput("source.tensors", "holds no tensors")
    is_known = source.tensors == known
    tensors: Sequence[Any] = () if is_known else source.tensors
    for number, meta in enumerate(tensors):
        where = f"source.tensors[{number}]"
        if not isinstance(meta, TensorMeta):
            raise BadInput(where, f"{type(meta).__name__} describes no tensor")
        _check_meta(where, meta.name, meta.dtype, meta.shape)
    _check_whole_number("source.bucket_nbytes", source.bucket_nbytes, 0, MOST_BUCKET_NBYTES)
    return msgspec.structs.replace(source, tensors=known) if is_known else source


def check_group(group: Any, ranks: int, interface: str) -> None:
    """Raise BadInput unless a generator of so many ranks may join the group: gloo and NCCL ask nobody who they are.

    Args:
        interface: that may be listened on; "": the loopback one alone.
    """
    if not isinstance(group, WeightsGroup):
        raise BadInput("group", f"{type(group).__name__} is no WeightsGroup")
    # structs of callers in this process are not checked by type
    timeout_s: Any = group.timeout_s
    address: Any = group.address
    _check_name("group.name", group.name)
    backend: Any = group.backend
    if not isinstance(backend, str) or backend not in ("gloo", "nccl"):
        raise BadInput("group.backend", f"{backend!r:.100} is not served", limit="gloo, nccl")
    _check_whole_number("group.port", group.port, 1, 65535)
    _check_whole_number("group.world_size", group.world_size, 2, _MOST_RANKS)
    _check_whole_number("group.rank", group.rank, 1, _MOST_RANKS)
    if group.rank + ranks > group.world_size:
        problem = f"ranks {group.rank} to {group.rank + ranks - 1} are asked of a group of {group.world_size}"
        raise BadInput("group.world_size", problem, hint=f"there are {ranks} workers here, and the trainer is rank 0")
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise BadInput("group.timeout_s", f"is {group.timeout_s!r}", limit=f"above 0, up to {_MOST_TIMEOUT_S:g}")
    if not isinstance(address, str) or not address or not _is_text(address):
        raise BadInput("group.address", f"{group.address!r} is no address")
    if not interface and not _is_loopback(group.address):
        problem = f"{group.address} is another machine's, and a process group asks nobody who they are"
        raise BadInput("group.address", problem, hint="name a trusted network's interface in weights_interface")


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not _is_text(name):
        raise BadInput(where, f"{name!r:.100} is no name", limit=f"1 to {_MAX_NAME_CHARS} characters")


def _check_whole_number(where: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadInput(where, f"is {value!r:.100}", limit=f"{low} to {high}")


def _tensor_of(number: int, entry: Any) -> tuple[TensorMeta, memoryview]:
    """A tensor's description and its bytes. Raises BadInput naming it."""
    where = f"source[{number}]"
    if not isinstance(entry, tuple) or len(entry) != 4:
        raise BadInput(where, "is not a tuple (name, dtype, shape, buffer)")
    name, dtype, shape, buffer = entry
    where = _check_meta(where, name, dtype, shape)
    try:
        data = memoryview(buffer)
    except Exception as error:
        # exporting is the buffer's own code: it may refuse in any way
        raise BadInput(where, f"{type(buffer).__name__} gives no buffer: {error}") from None
    if not data.c_contiguous:
        raise BadInput(where, "is not contiguous", hint="copy it first")
    if not _holds(data, dtype):
        problem = f"its buffer holds items of {data.itemsize} bytes in format {data.format!r}, which is not {dtype}"
        raise BadInput(where, problem, hint="give values of that dtype in this machine's byte order, or raw bytes")
    want = math.prod(shape) * ITEM_NBYTES[dtype]
    if data.nbytes != want:
        raise BadInput(where, f"has {data.nbytes} bytes, {dtype} {tuple(shape)} has {want}")
    return TensorMeta(name, dtype, tuple(shape)), data.cast("B") if data.nbytes else memoryview(b"")


def _check_meta(where: str, name: Any, dtype: Any, shape: Any) -> str:
    """Raise BadInput for what describes no tensor; returns the words that name it."""
    if not isinstance(name, str) or not name or not _is_text(name):
        raise BadInput(where, f"{name!r} is no name of a tensor")
    where = f"{where} {name!r}"
    if not isinstance(dtype, str) or dtype not in ITEM_NBYTES:
        raise BadInput(where, f"dtype {dtype!r} is not known", limit=", ".join(ITEM_NBYTES))
    if not _is_shape(shape):
        raise BadInput(where, f"{shape!r} is no shape")
    return where


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes, bytearray, memoryview)):
        return False
    return all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 63 for size in shape)


def _holds(data: memoryview, dtype: str) -> bool:
    """Whether a buffer's items may be of this dtype; items in other byte orders and structs never are."""
    form = data.format.removeprefix("@")
    if len(form) != 1:
        return False
    return form in _RAW_FORMATS or (form in _FORMATS[dtype] and data.itemsize == ITEM_NBYTES[dtype])


def _is_text(text: str) -> bool:
    """False for lone surrogates: no file and no message can hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
