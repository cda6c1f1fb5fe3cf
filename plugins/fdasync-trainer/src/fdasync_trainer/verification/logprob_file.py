"""A file of log-probs by request and position: what a rollout told, and what a trainer computed for the same tokens.

A safetensors file, which any trainer reads and writes with the public library. T tokens of N sequences, one after the
other, and L decoder layers:

    tokens        int32 [T]      prompt and output
    logprobs      float32 [T]    natural, of the token at this position, given those before it; NaN: not told, or, of a
                                 sampled token whose weights are named, not a number
    weights       int32 [T]      which of the metadata's weights it was computed with; -1: not told
    starts        int64 [N + 1]  sequence i has the entries [starts[i], starts[i + 1])
    prompt_lens   int32 [N]      tokens of the prompt
    samples       int32 [N]      number of the sample among those of its request
    temperatures  float64 [N]    that the logits were divided by; 1: raw log-probs
    digests       uint64 [T, L]  may be left out: XXH3-64 of each layer's output, its values as float32

Metadata: `format` "fdasync.logprobs/1"; `request_ids`, a JSON list of N strings; `weights`, a JSON list of [version,
fingerprint], whose fingerprint may be "". A trainer copies all but `logprobs` and the weights. Sequences are found by
request and sample, in any order.

Shapes are checked against each other before a tensor is read; nothing is unpickled. Knows no engines and no models.
Called by `fdasync verify-trainer` and by users; `logprob_compare.py` compares two of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fdasync.errors import BadInput
from fdasync_trainer.verification.logprob_table import LogprobTable, ScoredSequence, WeightsName, checked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

FORMAT = "fdasync.logprobs/1"
# tensors: their dtype in the file, and its axes: tokens of all sequences (t), sequences (n), bounds (n + 1), layers (l)
_TENSORS = {
    "tokens": ("I32", "t"),
    "logprobs": ("F32", "t"),
    "weights": ("I32", "t"),
    "starts": ("I64", "b"),
    "prompt_lens": ("I32", "n"),
    "samples": ("I32", "n"),
    "temperatures": ("F64", "n"),
    "digests": ("U64", "tl"),
}
_OPTIONAL = "digests"
# the header has the names of all requests
_MAX_HEADER_NBYTES = 64 << 20
_MAX_TOKENS = 1 << 31


def write_logprobs(path: str | os.PathLike[str], table: LogprobTable) -> None:
    """Write a table; the file appears whole or not at all, also when this is interrupted. Raises BadInput if the table
    cannot be written; OSError."""
    sequences = checked(table, "table").sequences
    lengths = [len(one.token_ids) for one in sequences]
    tensors: dict[str, NDArray[Any]] = {
        "tokens": _joined([one.token_ids for one in sequences], np.int32),
        "logprobs": _joined([one.logprobs for one in sequences], np.float32),
        "weights": _joined([one.weights for one in sequences], np.int32),
        "starts": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_lens": np.array([one.prompt_len for one in sequences], np.int32),
        "samples": np.array([one.sample for one in sequences], np.int32),
        "temperatures": np.array([one.temperature for one in sequences], np.float64),
    }
    digests = [one.digests for one in sequences if one.digests is not None]
    if digests:
        tensors[_OPTIONAL] = np.concatenate(digests).astype(np.uint64, copy=False)
    metadata = {
        "format": FORMAT,
        "request_ids": json.dumps([one.request_id for one in sequences]),
        "weights": json.dumps([[one.version, one.weights_id] for one in table.weights]),
    }
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, beside, metadata)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def read_logprobs(path: str | os.PathLike[str]) -> LogprobTable:
    """Read a table. Raises BadInput naming the file if it is no such file or does not fit together; OSError."""
    file = Path(path)
    with file.open("rb") as opened:
        head = opened.read(8)
    if len(head) < 8 or int.from_bytes(head, "little") > _MAX_HEADER_NBYTES:
        raise BadInput(
            str(file), "is no safetensors file, or its header is too long", limit=f"{_MAX_HEADER_NBYTES} bytes"
        )
    try:
        with safe_open(file, framework="numpy") as opened:
            return _read(opened, str(file))
    except SafetensorError as error:
        raise BadInput(str(file), f"is no whole safetensors file: {error}") from None


def _read(opened: Any, field: str) -> LogprobTable:
    metadata = opened.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise BadInput(field, f"is of format {metadata.get('format')!r:.100}", limit=FORMAT)
    request_ids = _json(metadata, "request_ids", list[str], field)
    weights = _json(metadata, "weights", list[WeightsName], field)
    held = _check_shapes(opened, len(request_ids), field)
    tensors = {name: opened.get_tensor(name) for name in held}
    starts = tensors["starts"]
    if starts[0] != 0 or starts[-1] != len(tensors["tokens"]) or (np.diff(starts) < 0).any():
        raise BadInput(field, "starts do not rise from 0 to the number of tokens")
    sequences = []
    for number, request_id in enumerate(request_ids):
        part = slice(int(starts[number]), int(starts[number + 1]))
        sequences.append(
            ScoredSequence(
                request_id=request_id,
                sample=int(tensors["samples"][number]),
                token_ids=tensors["tokens"][part],
                prompt_len=int(tensors["prompt_lens"][number]),
                logprobs=tensors["logprobs"][part],
                weights=tensors["weights"][part],
                temperature=float(tensors["temperatures"][number]),
                digests=tensors[_OPTIONAL][part] if _OPTIONAL in held else None,
            )
        )
    return checked(LogprobTable(tuple(sequences), tuple(weights)), field)


def _check_shapes(opened: Any, sequences: int, field: str) -> list[str]:
    """Names of the tensors to read. Raises BadInput unless their dtypes and shapes fit; reads no tensor."""
    there = set(opened.keys())
    if lacking := sorted(_TENSORS.keys() - there - {_OPTIONAL}):
        raise BadInput(field, f"lacks the tensor {lacking[0]}")
    sizes = {"n": sequences, "b": sequences + 1}
    held = [name for name in _TENSORS if name in there]
    for name in held:
        dtype, axes = _TENSORS[name]
        part = opened.get_slice(name)
        shape = part.get_shape()
        if part.get_dtype() != dtype or len(shape) != len(axes):
            raise BadInput(field, f"{name} is {part.get_dtype()} {shape}", limit=f"{dtype} of {len(axes)} axes")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size or size > _MAX_TOKENS:
                raise BadInput(field, f"{name} has {size} entries where {sizes[axis]} belong")
    return held


def _json(metadata: Mapping[str, str], name: str, kind: Any, field: str) -> Any:
    try:
        return msgspec.json.decode(metadata.get(name, ""), type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(field, f"metadata {name}: {error}") from None
