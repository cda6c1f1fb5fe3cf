"""A sender of `test_peer_pool.py`: a pool of a device, shown through a socket, until it is killed.

Arguments: the socket's fd, blocks, bytes of a block. Byte i of block b is (i % 251 + b) % 256.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import torch

from fdasync.gpu.cudart import Driver
from fdasync.gpu.mapped_memory import MappedMemory


def main() -> None:
    fd, blocks, block = map(int, sys.argv[1:4])
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    memory = MappedMemory.create(Driver(), device, blocks * block)
    rows = memory.tensor().view(blocks, block)
    base = torch.arange(block, device=device) % 251
    for number in range(blocks):
        rows[number] = (base + number).to(torch.uint8)
    torch.cuda.synchronize()
    with socket.socket(fileno=fd) as sock:
        shown = memory.export()
        socket.send_fds(sock, [b"p"], [shown])
        os.close(shown)
        signal.pause()


if __name__ == "__main__":
    main()
