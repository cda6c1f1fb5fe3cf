"""Rows of a result as parts of an answer: base64, made in pieces while it is sent.

A 32,000-token sample has 65 MB of SGLang's base64. Made at once it would take as much memory again and hold the loop up
for 100 ms. So each piece covers a few hundred rows, and other requests run in between. The bytes are the same as
`fdasync_trainer.rows` makes; tests compare them. Called by the rooms of paths.
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync_http.parts import MARK
from fdasync_http.replies import Part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from numpy.typing import NDArray

    from fdasync import ChosenPositions, Routing, Sample

# bytes of rows that become base64 at a time: under a millisecond
_PIECE_NBYTES = 3 << 18


def ended_in_prompt(sample: Sample) -> bool:
    """Whether a sample was ended before its first token: it has rows of a part of its prompt, and clients reckon the
    number of rows from the numbers of tokens."""
    return not sample.token_ids and sample.finish_reason in ("abort", "deadline")


def sglang(routing: Routing, num_hidden_layers: int) -> Part:
    """SGLang's form: base64 of int32 [rows, hidden layers, top_k], dense layers zero, little endian. Columns past a
    layer's own k repeat its first pick."""
    return _base64(routing, num_hidden_layers, "<i4")


def npy(routing: Routing, num_hidden_layers: int) -> Part:
    """vLLM's form: base64 of a `.npy`, [rows, hidden layers, top_k], uint8 up to 256 experts, else uint16."""
    dtype = routing.array.dtype.newbyteorder("<")
    file = BytesIO()
    # blocking: memory, a few hundred bytes
    np.lib.format.write_array_header_1_0(
        file,
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (len(routing.array), num_hidden_layers, routing.array.shape[2]),
        },
    )
    return _base64(routing, num_hidden_layers, dtype.str, file.getvalue())


def chosen(positions: ChosenPositions) -> Part:
    """SGLang's form of what indexers chose: base64 of int32 [rows, layers, top_k], little endian."""
    array = positions.array
    step = max(_PIECE_NBYTES // (array[:1].nbytes or 1), 1)
    return _part(
        array.nbytes, b"", range(0, len(array), step), lambda at: array[at : at + step].astype("<i4").tobytes()
    )


def packed(routing: Routing, num_hidden_layers: int, dtypes: tuple[str, ...]) -> tuple[dict[str, Any], Part]:
    """The form of prime-rl and SkyRL, `{data, shape, dtype}` with a mark for the data, which is the first key; the
    dtype is the first of `dtypes` that holds the highest id."""
    highest = int(_filled(routing.array, routing.top_k_by_layer).max(initial=0))
    dtype = next(name for name in dtypes if highest <= np.iinfo(name).max)
    shape = [len(routing.array), num_hidden_layers, routing.array.shape[2]]
    part = _base64(routing, num_hidden_layers, np.dtype(dtype).newbyteorder("<").str)
    return {"data": MARK, "shape": shape, "dtype": dtype}, part


def _filled(rows: NDArray[np.generic], top_k_by_layer: tuple[int, ...] | None) -> NDArray[np.generic]:
    if top_k_by_layer is None:
        return rows
    counted = np.arange(rows.shape[2]) < np.array(top_k_by_layer)[:, None]
    return np.where(counted, rows, rows[:, :, :1])


def _base64(routing: Routing, num_hidden_layers: int, dtype: str, head: bytes = b"") -> Part:
    """base64 of `head` and of the rows over all hidden layers, in pieces."""
    rows, layers = routing.array, np.array(routing.layer_ids)
    row_nbytes = num_hidden_layers * rows.shape[2] * np.dtype(dtype).itemsize
    nbytes = len(head) + len(rows) * row_nbytes
    step = max(_PIECE_NBYTES // row_nbytes, 1)

    def some(first: int) -> bytes:
        part = _filled(rows[first : first + step], routing.top_k_by_layer)
        wide = np.zeros((len(part), num_hidden_layers, part.shape[2]), dtype)
        wide[:, layers] = part
        return wide.tobytes()

    return _part(nbytes, head, range(0, len(rows), step), some)


def _part(nbytes: int, head: bytes, firsts: range, some: Callable[[int], bytes]) -> Part:
    """base64 of `head` and of what `some` returns for each of `firsts`, which are so many bytes together."""

    async def pieces() -> AsyncIterator[bytes]:
        rest = head
        for first in firsts:
            data = rest + some(first)
            # base64 has groups of three bytes
            whole = len(data) - len(data) % 3
            rest = data[whole:]
            if whole:
                yield b2a_base64(data[:whole], newline=False)
            await asyncio.sleep(0)
        if rest:
            yield b2a_base64(rest, newline=False)

    return Part(-(-nbytes // 3) * 4, pieces)
