"""Base64, `.npy` and `{data, shape, dtype}`, read with care: nothing is decoded before its size is known to fit.

Knows no trainer and no experts. Called by the converters beside it.
"""

from __future__ import annotations

import base64
import io
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

# most decoded bytes by default: 550,000 tokens of an int32 payload of 61 layers x 8
MAX_NBYTES = 1 << 30
_MOST_SHAPE = (1 << 63) - 1
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_HEADER = re.compile(
    rb"\{'descr': '([^']{1,8})', 'fortran_order': (False|True), 'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\), \} *\n"
)
_NPY_DTYPES = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8")


def encode(data: NDArray[Any] | bytes) -> str:
    """Base64 of bytes, or of the bytes of a C-contiguous array."""
    return base64.b64encode(data if isinstance(data, bytes) else data.data).decode("ascii")


def decode(text: object, field: str, max_nbytes: int) -> bytes:
    """The bytes of a base64 text. Raises BadInput: no text, too long, or not strict base64."""
    if not isinstance(text, str):
        raise BadInput(field, f"a base64 text is needed, not {type(text).__name__}")
    nbytes = len(text) // 4 * 3 - text.count("=", -2)
    if nbytes > max_nbytes:
        raise BadInput(field, f"{nbytes} bytes", limit=max_nbytes, hint="set max_nbytes if that is right")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BadInput(field, f"is not base64: {error}") from None


def shaped(raw: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], field: str) -> NDArray[np.generic]:
    """A read-only view of these bytes. Raises BadInput unless the shape needs exactly as many, and numpy takes it."""
    # numpy refuses a shape by its product without the zeros, also where an array has no bytes
    if math.prod(dim for dim in shape if dim) * dtype.itemsize > _MOST_SHAPE:
        raise BadInput(field, f"{list(shape)} is too large for any array")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(raw) != nbytes:
        raise BadInput(field, f"{len(raw)} bytes for {dtype.name} {list(shape)}, which takes {nbytes}")
    array: NDArray[np.generic] = np.frombuffer(raw, dtype).reshape(shape)
    return array


def save_npy(array: NDArray[np.generic]) -> bytes:
    """The bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def load_npy(raw: bytes, field: str) -> NDArray[np.generic]:
    """Integers of three axes out of a `.npy` of format 1.0; a read-only view of `raw`.

    The header is matched against the form that `numpy.save` writes and never evaluated. Raises BadInput: another
    version, any dtype but little-endian integers (so no pickled objects), Fortran order, or a shape that does not fit
    the bytes.
    """
    if not raw.startswith(_NPY_MAGIC) or len(raw) < 10:
        raise BadInput(field, "is no .npy of format 1.0")
    end = 10 + int.from_bytes(raw[8:10], "little")
    header = _NPY_HEADER.fullmatch(raw[10:end])
    if len(raw) < end or header is None:
        raise BadInput(field, "has a header that numpy.save does not write for an array of numbers")
    descr, fortran, dims = (part.decode("ascii", "replace") for part in header.groups())
    if descr not in _NPY_DTYPES:
        raise BadInput(field, f"is of dtype {descr!r}", limit=list(_NPY_DTYPES))
    if fortran == "True":
        raise BadInput(field, "is in Fortran order", hint="save numpy.ascontiguousarray of it")
    shape = tuple(int(dim) for dim in dims.replace(",", " ").split())
    if len(shape) != 3:
        raise BadInput(field, f"is of shape {list(shape)}", limit="[n, layers, top_k]")
    return shaped(raw[end:], shape, np.dtype(descr), field)


def pack(array: NDArray[np.generic]) -> dict[str, Any]:
    """`{"data": base64, "shape": [...], "dtype": name}` of a C-contiguous array."""
    return {"data": encode(array), "shape": list(array.shape), "dtype": array.dtype.name}


def unpack(
    payload: Mapping[str, Any], field: str, dtypes: tuple[str, ...], max_nbytes: int, *, default: str = ""
) -> NDArray[np.generic]:
    """Three axes of integers out of a payload of `pack`; `default`: the dtype if it names none ("": refused).

    Raises BadInput: no mapping, a key missing, a dtype not among `dtypes`, a shape that does not fit the bytes, or too
    many bytes.
    """
    try:
        data, shape, name = payload["data"], payload["shape"], payload.get("dtype") or default
    except (KeyError, TypeError, AttributeError):
        raise BadInput(field, "is no mapping with data, shape and dtype") from None
    if name not in dtypes:
        raise BadInput(f"{field}.dtype", f"{name!r} is none of this format", limit=list(dtypes))
    if not isinstance(shape, list | tuple) or len(shape) != 3 or any(type(dim) is not int or dim < 0 for dim in shape):
        raise BadInput(f"{field}.shape", f"{shape!r} is no shape", limit="[n, layers, top_k]")
    if any(dim > _MOST_SHAPE for dim in shape):  # not shown: it may have more digits than Python writes
        raise BadInput(f"{field}.shape", "has an axis longer than any array", limit="[n, layers, top_k]")
    dtype = np.dtype(name).newbyteorder("<")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > max_nbytes:
        raise BadInput(f"{field}.shape", f"{nbytes} bytes", limit=max_nbytes, hint="set max_nbytes if that is right")
    return shaped(decode(data, f"{field}.data", max_nbytes), tuple(shape), dtype, f"{field}.data")
