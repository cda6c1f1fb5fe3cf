"""Reads tensors from shards, and dequantises bands of rows of those that are stored with scales.

The arithmetic is that of the library's own dequantisers, bit for bit: FP8 values times their scales in float32, rounded
once; MXFP4 by the library's function. On GPUs it runs on the device. Knows no models. Called by `reading.py`,
`loading.py` and `ties.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fdasync_transformers.weights.shards import Quantized, StoredTensor

_E8M0_BIAS = 127.0


class OpenShards:
    """Files opened when they are first read; a context manager, which closes them. Every verb raises CheckpointError
    naming the file."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        files = list(self._open.values())
        self._open.clear()
        for file in files:
            file.__exit__(None, None, None)

    def tensor(self, path: Path, key: str) -> torch.Tensor:
        """A stored tensor, whole."""
        return self._read(path, lambda file: file.get_tensor(key))

    def rows(self, path: Path, key: str, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` (exclusive) of a stored tensor's first dimension."""
        return self._read(path, lambda file: file.get_slice(key)[first:last])

    def _read(self, path: Path, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        try:
            if path not in self._open:
                opened: Any = safe_open(path, framework="pt")
                self._open[path] = opened.__enter__()
            return read(self._open[path])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(path), f"cannot be read: {error}") from error


def bands(shape: tuple[int, ...], nbytes: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) index of the first dimension, so that a band in float32 takes about `nbytes`."""
    count = max(1, nbytes // max(1, 4 * math.prod(shape[1:])))
    for first in range(0, shape[0], count):
        yield first, min(first + count, shape[0])


def dequantized(
    shards: OpenShards, stored: StoredTensor, quantized: Quantized, first: int, last: int, like: torch.Tensor
) -> torch.Tensor:
    """Rows `first` to `last` (exclusive) of the unpacked tensor, in the dtype and on the device of `like`.

    Raises CheckpointError.
    """
    values = shards.rows(stored.file, quantized.values, first, last).to(like.device)
    if len(stored.shape) == 3:
        scales = shards.rows(quantized.scales_file, quantized.scales, first, last).to(like.device)
    else:
        scales = shards.tensor(quantized.scales_file, quantized.scales).to(like.device)
    if quantized.block is None:
        packed: Any = convert_moe_packed_tensors
        made: torch.Tensor = packed(values, scales, dtype=like.dtype)
        return made
    height, width = quantized.block
    rows, columns = stored.shape[-2:]
    # one byte is an exponent
    factors = (scales.float() - _E8M0_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()
    # one scale may be stored in any shape; the last blocks may be cut off by the tensor's edge
    factors = factors.reshape(*values.shape[:-2], math.ceil(rows / height), math.ceil(columns / width))
    if len(stored.shape) == 3:
        factors = factors.repeat_interleave(height, -2)[:, :rows]
    else:
        skipped = first // height
        factors = factors[skipped : math.ceil(last / height)].repeat_interleave(height, 0)
        factors = factors[first - skipped * height :][: last - first]
    return values.float().mul_(factors.repeat_interleave(width, -1)[..., :columns]).to(like.dtype)
