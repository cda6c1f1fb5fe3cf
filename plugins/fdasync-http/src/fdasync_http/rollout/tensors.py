"""Writes a sample as a safetensors file whose arrays are sent from the memory that they are in.

The format (huggingface/safetensors): the length of a JSON header as u64, the header, then the arrays one behind the
other, all little endian. Its metadata are strings. Pure. Called by `generate.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync_http.replies import Part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from fdasync import Sample

_NAMES = {
    "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32", "uint64": "U64",
    "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL",
}  # fmt: skip
# bytes of an array that are handed to the socket at a time
_PIECE_NBYTES = 1 << 20
# readers map the arrays: they begin at a multiple of this
_ALIGN = 8


def sample_file(sample: Sample, prompt_token_ids: Sequence[int], *, request_id: str, model: str) -> list[bytes | Part]:
    """The file of one sample; docs of the arrays and of the metadata are in the README of this plugin."""
    arrays: dict[str, NDArray[Any]] = {
        "prompt_token_ids": np.array(prompt_token_ids, np.int32),
        "token_ids": np.array(sample.token_ids, np.int32),
    }
    if sample.raw_logprobs is not None:
        arrays["raw_logprobs"] = sample.raw_logprobs
    if sample.processed_logprobs is not None:
        arrays["processed_logprobs"] = sample.processed_logprobs
    rows = max(len(prompt_token_ids) + len(sample.token_ids) - 1 - sample.start, 0)
    meta = {
        "format": "fdasync-rollout-1",
        "request_id": request_id,
        "index": str(sample.index),
        "model": model,
        "finish_reason": sample.finish_reason,
        "stop_token_id": "" if sample.stop_token_id is None else str(sample.stop_token_id),
        "stop_reason": "" if sample.stop_reason is None else str(sample.stop_reason),
        "text": sample.text,
        "cached_tokens": str(sample.cached_tokens),
        "start": str(sample.start),
        "weight_versions": msgspec.json.encode(sample.weight_version).decode(),
        "num_rows_of_all_positions": str(rows),
    }
    routing = sample.routing
    if routing is not None:
        arrays["routing"] = routing.array
        meta["routing.layer_ids"] = msgspec.json.encode(routing.layer_ids).decode()
        meta["routing.num_experts"] = str(routing.num_experts)
        meta["routing.top_k_by_layer"] = msgspec.json.encode(routing.top_k_by_layer).decode()
        meta["routing.complete"] = "true" if len(routing.array) == rows else "false"
    chosen = sample.chosen_positions
    if chosen is not None:
        arrays["chosen_positions"] = chosen.array
        meta["chosen_positions.start"] = str(chosen.start)
        meta["chosen_positions.layer_ids"] = msgspec.json.encode(chosen.layer_ids).decode()
    for name, array in sample.aux.items():
        arrays[f"aux.{name}"] = array
    return _file(arrays, meta)


def _file(arrays: dict[str, NDArray[Any]], meta: dict[str, str]) -> list[bytes | Part]:
    header: dict[str, Any] = {"__metadata__": meta}
    # the widest items first, so that each array is aligned to its own items
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    at = 0
    for name, array in ordered:
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(len(encoded)) % _ALIGN)
    body: list[bytes | Part] = [len(encoded).to_bytes(8, "little") + encoded]
    body += [_sent(array) for _, array in ordered if array.nbytes]
    return body


def _sent(array: NDArray[Any]) -> Part:
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data.cast("B")

    async def pieces() -> AsyncIterator[bytes]:
        for first in range(0, len(data), _PIECE_NBYTES):
            yield bytes(data[first : first + _PIECE_NBYTES])
            await asyncio.sleep(0)

    return Part(len(data), pieces)
