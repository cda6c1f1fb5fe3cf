"""The tensors that a trainer gives, under their names, and the dtypes that updates have names for.

Knows no model of the engine's. Called by `named.py`, `update.py`, and by what sends and writes weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import WeightsRejected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def own_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, or of a state dict, by name; a tied one once. Raises WeightsRejected for one without
    data."""
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...], torch.device]] = set()
    for name, tensor in state.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightsRejected(f"{name} holds no plain data")
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and where in seen:
            continue
        seen.add(where)
        yield name, tensor


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The dtype as updates name it. Raises WeightsRejected for one that no runner takes."""
    if tensor.dtype not in _NAMES:
        raise WeightsRejected(f"{name} has dtype {tensor.dtype}, which is none of {', '.join(DTYPES)}")
    return _NAMES[tensor.dtype]
