"""Many small arrays in one copy: a step's inputs on their way to the device, its results on their way back.

A copy costs microseconds of launch whatever its size, so arrays are laid side by side in one page-locked buffer. The
buffer is held: it goes back to its pool when the device was seen to be done with it, never earlier. Knows no steps and
no streams: copies are queued on the stream that is current. Called by runners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync.gpu.pools import PinnedHold, PinnedPool

# of each array's place in the buffer; enough for any dtype
_ALIGN_NBYTES = 16


def send(
    arrays: Mapping[str, NDArray[np.generic]], pool: PinnedPool, device: torch.device
) -> tuple[dict[str, torch.Tensor], PinnedHold]:
    """Queue one copy of all arrays to the device; tensors of the same names, shapes and dtypes.

    The caller releases the hold when the copy was seen to be done; the arrays may change at once. Raises what
    `PinnedPool.take` raises, before anything is queued.
    """
    offsets, nbytes = _layout([array.nbytes for array in arrays.values()])
    hold = pool.take(max(nbytes, 1))
    for array, offset in zip(arrays.values(), offsets, strict=True):
        hold.array[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.empty(len(hold.tensor), dtype=torch.uint8, device=device)
    flat.copy_(hold.tensor, non_blocking=True)
    sent = {
        name: flat[offset : offset + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for (name, array), offset in zip(arrays.items(), offsets, strict=True)
    }
    return sent, hold


def fetch(tensors: Mapping[str, torch.Tensor], pool: PinnedPool) -> tuple[dict[str, NDArray[np.generic]], PinnedHold]:
    """Queue copies of all tensors to the host; arrays of the same names, shapes and dtypes, views of the held buffer.

    The arrays have meaning from when the copies were seen to be done until the hold is released. The caller keeps the
    tensors until the copies are done. Raises what `PinnedPool.take` raises, before anything is queued.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    offsets, nbytes = _layout(sizes)
    hold = pool.take(max(nbytes, 1))
    arrays: dict[str, NDArray[np.generic]] = {}
    for (name, tensor), offset, size in zip(tensors.items(), offsets, sizes, strict=True):
        hold.tensor[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        arrays[name] = hold.array[offset : offset + size].view(dtype).reshape(tuple(tensor.shape))
    return arrays, hold


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
    return offsets, end


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found
