"""Gives a model's tensors in the form that `engine.update_weights` takes.

Knows no engine. Called by trainers, in their own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import WeightsRejected
from fdasync_transformers.weights.update import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

NamedTensor = tuple[str, str, tuple[int, ...], "NDArray[np.uint8]"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def named_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[NamedTensor]:
    """(name, dtype, shape, buffer) of every tensor of a model, or of a state dict under its own names.

        await engine.update_weights(version, named_tensors(model))

    A buffer is the tensor's bytes, flat. Tensors that lie on the CPU in one piece are not copied: their buffers are
    views, so leave the weights alone until the update has ended. Other tensors (on a GPU, transposed) are copied here.
    A tied tensor comes once, under its first name. Give a state dict to send some tensors only: the others keep their
    values. Parts sharded over processes must be gathered first.

    Raises WeightsRejected for a tensor without data, or of a dtype that no runner takes.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...], torch.device]] = set()
    named: list[NamedTensor] = []
    for name, tensor in state.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightsRejected(f"{name} holds no plain data")
        if tensor.dtype not in _NAMES:
            raise WeightsRejected(f"{name} has dtype {tensor.dtype}, which is none of {', '.join(DTYPES)}")
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and where in seen:
            continue
        seen.add(where)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        named.append((name, _NAMES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy()))
    return named
