"""How long blocks are on the wire between two GPUs: arm `wire` of `gpu_pd`.

    python -m benchmarks.gpu.wire BLOCKS BLOCK_NBYTES

A process shows a pool of blocks on the second GPU, as an instance's worker does; this one, on the first GPU, maps it,
copies all blocks into its own pool and sums them there, as the `device` transport does. Prints JSON: milliseconds of
each round from asking for the blocks to their checksums, in one batch (`whole`) and in the transport's batches, one
after the other (`batches`). Raises SystemExit where a checksum is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import torch
import uvloop
from fdasync_fleet.transfer.device import _BATCH_NBYTES
from fdasync_kernels.block_sums import run_sums

from fdasync.gpu.cudart import Driver
from fdasync.gpu.mapped_memory import MappedMemory
from fdasync.gpu.peer_pool import DevicePool
from fdasync.gpu.pools import EventPool, PinnedPool
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.streams import Streams
from fdasync.ipc.peers.blocks import BlockPull, PoolExport
from fdasync.ipc.peers.rows import PeerRows
from fdasync.ipc.peers.sums import block_sums

_SOURCE = b"wire".ljust(16)
_ROUNDS, _UNTIMED = 12, 3
_LIMIT_S = 60.0


def filled(device: torch.device, blocks: int, block_nbytes: int) -> tuple[MappedMemory, torch.Tensor]:
    """A pool of random bytes, the same on every device of a kind."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    memory = MappedMemory.create(Driver(), device, blocks * block_nbytes)
    tensor = memory.tensor()
    noise = torch.Generator(device).manual_seed(1)
    tensor.copy_(torch.randint(0, 256, (len(tensor),), dtype=torch.uint8, device=device, generator=noise))
    torch.cuda.synchronize()
    return memory, tensor


def show(fd: int, blocks: int, block_nbytes: int) -> None:
    """The sender: shows its pool until it is killed."""
    memory, _tensor = filled(torch.device("cuda", 1), blocks, block_nbytes)
    with socket.socket(fileno=fd) as sock:
        shown = memory.export()
        socket.send_fds(sock, [b"p"], [shown])
        os.close(shown)
        signal.pause()


async def measure(shown: int, blocks: int, block_nbytes: int) -> dict[str, list[float]]:
    device = torch.device("cuda", 0)
    memory, tensor = filled(device, blocks, block_nbytes)
    wanted = block_sums(tensor.view(blocks, block_nbytes).cpu().numpy()).tolist()
    driver, port = Driver(), AdaptivePort()
    pinned = PinnedPool(1 << 26, pinned=True)
    pool = DevicePool(memory, tensor, driver, Streams(device), EventPool(torch.cuda.Event), pinned, port, run_sums)
    own = PoolExport("cuda", len(tensor), blocks, 0, block_nbytes, block_nbytes, 0, block_nbytes, 0, block_nbytes, True)
    peers = PeerRows(pool, own)
    await peers.open(_SOURCE, [own], [shown])
    each = max(1, _BATCH_NBYTES // block_nbytes)
    found: dict[str, list[float]] = {}
    for name, size in (("whole", blocks), ("batches", each)):
        for turn in range(_ROUNDS):
            tensor.zero_()
            torch.cuda.synchronize()  # blocking: between rounds
            began = time.perf_counter()
            sums: list[int] = []
            for first in range(0, blocks, size):
                part = tuple(range(first, min(first + size, blocks)))
                sums += await peers.pull(BlockPull(_SOURCE, part, part))
            if turn >= _UNTIMED:
                found.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
            if sums != wanted:
                raise SystemExit("a block came with another checksum")
    await peers.aclose()
    await port.aclose()
    return found


def main() -> None:
    if sys.argv[1] == "show":
        show(*map(int, sys.argv[2:5]))
        return
    blocks, block_nbytes = map(int, sys.argv[1:3])
    here, there = socket.socketpair()
    here.settimeout(_LIMIT_S)
    command = [sys.executable, "-m", "benchmarks.gpu.wire", "show", str(there.fileno()), *sys.argv[1:3]]
    sender = subprocess.Popen(command, pass_fds=[there.fileno()])
    there.close()
    try:
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
        print(json.dumps(uvloop.run(measure(fds[0], blocks, block_nbytes))))
    finally:
        sender.kill()
        sender.wait()


if __name__ == "__main__":
    main()
