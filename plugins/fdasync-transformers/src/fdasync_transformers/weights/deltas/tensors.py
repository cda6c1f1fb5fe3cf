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
    # by address; numbers and no tuples, which the garbage collector would walk over by the thousand
    firsts: dict[int, torch.Tensor] = {}
    others: list[torch.Tensor] = []
    for name, tensor in state.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightsRejected(f"{name} holds no plain data")
        first = firsts.setdefault(tensor.data_ptr(), tensor) if tensor.numel() else tensor
        if first is not tensor:
            if any(_are_tied(tensor, other) for other in (first, *others)):
                continue
            others.append(tensor)
        yield name, tensor


def _are_tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The dtype as updates name it. Raises WeightsRejected if no runner takes it."""
    if tensor.dtype not in _NAMES:
        raise WeightsRejected(f"{name} has dtype {tensor.dtype}, which is none of {', '.join(DTYPES)}")
    return _NAMES[tensor.dtype]
