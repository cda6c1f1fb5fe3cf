"""Sources of new weights, checked: a folder's path, or tensors in memory. Checks all but their content.

Called by `weights.py` and by `pd`, whose instances and routers take the same calls. Knows no runner's weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fdasync.errors import BadInput
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from fdasync.request import WeightSource

ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
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
    """The path of a folder; None for another kind of source. Raises BadInput for a path that can be none."""
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


def _tensor_of(number: int, entry: Any) -> tuple[TensorMeta, memoryview]:
    """A tensor's description and its bytes. Raises BadInput naming it."""
    where = f"source[{number}]"
    if not isinstance(entry, tuple) or len(entry) != 4:
        raise BadInput(where, "is not a tuple (name, dtype, shape, buffer)")
    name, dtype, shape, buffer = entry
    if not isinstance(name, str) or not name or not _is_text(name):
        raise BadInput(where, f"{name!r} is no name of a tensor")
    where = f"source[{number}] {name!r}"
    if not isinstance(dtype, str) or dtype not in ITEM_NBYTES:
        raise BadInput(where, f"dtype {dtype!r} is not known", limit=", ".join(ITEM_NBYTES))
    if not _is_shape(shape):
        raise BadInput(where, f"{shape!r} is no shape")
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
