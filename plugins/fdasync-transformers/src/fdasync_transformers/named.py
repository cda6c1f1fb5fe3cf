"""A model's tensors as `engine.update_weights` takes them. For trainers: runs in their process, not in the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fdasync.errors import WeightsRejected
from fdasync_transformers.weights import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

NamedTensor = tuple[str, str, tuple[int, ...], "NDArray[np.uint8]"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def named_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[NamedTensor]:
    """(name, dtype, shape, buffer) of every tensor of a model, or of a state dict under any names of its own.

        await engine.update_weights(version, named_tensors(model))

    A buffer is the tensor's bytes, flat. Tensors that lie on the CPU in one piece are not copied: their buffers are
    views, so leave the weights alone until the update has ended. Others (on a GPU, transposed) are copied here.
    Of tied tensors the first name is given. Give a state dict to send a part only: names left out keep their
    values. Parts sharded over processes must be gathered first.

    Raises WeightsRejected for a tensor that holds no data, or whose dtype no runner takes.
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
