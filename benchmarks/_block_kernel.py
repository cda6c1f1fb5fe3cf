"""A kernel that moves blocks between the device pool and the host tier's registered pages. Pure bytes.

A few programs go over the blocks one after the other, each taking every n-th tile of a block: that fills the bus and
leaves the other multiprocessors to the step beside it. The package does not use it: such copies make a concurrent step
up to three times as long, copies by the driver do not. Kept so that `gpu_copies` can repeat the comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena
    from fdasync.gpu.block_rows import Lane

# words of 8 bytes that one program moves at a time: 16 KiB
TILE = 2048


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _move_blocks(table, device, host, device_stride, host_stride, count, words, out: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(words, size)
    for block in range(count):
        # 64 bits: a pool has more words than 32 bits count
        device_block = device + tl.load(table + block) * device_stride
        host_block = host + tl.load(table + count + block) * host_stride
        for tile in range(program, tiles, programs):
            offset = tile * size + tl.arange(0, size)
            inside = offset < words
            if out:
                tl.store(host_block + offset, tl.load(device_block + offset, mask=inside), mask=inside)
            else:
                tl.store(device_block + offset, tl.load(host_block + offset, mask=inside), mask=inside)


def word_view(rows: torch.Tensor) -> torch.Tensor:
    """uint8 rows [n, nbytes] as the widest integers that they divide into."""
    for word in (torch.int64, torch.int32):
        size = word.itemsize
        if not any(number % size for number in (rows.shape[1], rows.stride(0), rows.data_ptr())):
            return rows.view(word)
    return rows


def move_blocks(
    device: torch.Tensor,
    host: torch.Tensor,
    device_ids: NDArray[np.int64],
    host_ids: NDArray[np.int64],
    *,
    out: bool,
    programs: int = 16,
) -> torch.Tensor:
    """Launch the copy of blocks on the current stream: `device[device_ids[i]]` to `host[host_ids[i]]`, or back.

    `device` [num_blocks, words] and `host` [num_host_blocks, words] come from `word_view`, of one dtype, any distance
    between rows; `host` is pinned or registered under the host's own addresses. Ids are checked by the caller, and no
    destination is named twice. Returns the table that the kernel reads: keep it until the kernel is done.
    """
    table = torch.from_numpy(np.concatenate((device_ids, host_ids)))
    if device.is_cuda:
        # read over the bus, two words a block: cheaper for the host than one more copy
        table = table.pin_memory()
    words = device.shape[1]
    _move_blocks[(min(programs, triton.cdiv(words, TILE)),)](
        table, device, host, device.stride(0), host.stride(0), len(device_ids), words, out=out, size=TILE, num_warps=8
    )
    return table


class KernelWay:
    """A `fdasync.gpu.block_copies.Way`: one kernel that reads and writes the host's pages.

    `device` uint8 [num_blocks, nbytes]; `host` is registered under its own addresses. Holds a view of its `kv`, and
    the tables of all launches, which the device reads: let go of it when the device is done.
    """

    name = "kernel"
    at_once = 4096

    def __init__(self, device: torch.Tensor, host: HostArena, programs: int = 16) -> None:
        self._programs = programs
        rows = torch.from_numpy(host.kv)
        self._device, self._host = word_view(device), word_view(rows)
        if self._device.dtype != self._host.dtype:
            self._device, self._host = device, rows
        self._tables: list[torch.Tensor] = []

    def submit(self, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        out = lane == "copy_out"
        self._tables.append(move_blocks(self._device, self._host, device, host, out=out, programs=self._programs))
