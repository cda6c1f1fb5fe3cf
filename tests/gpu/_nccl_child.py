"""One rank of a group that gathers by NCCL: checks what it gathers, in a process of its own. The program's arguments
are rank, number of ranks, and the descriptors of `Meeting.fds`."""

from __future__ import annotations

import sys

import torch

from fdasync.gpu.nccl import NcclGroup
from fdasync.ipc.exchange import Exchange


def main() -> None:
    rank, ranks, *fds = map(int, sys.argv[1:])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange = Exchange(rank, ranks, fds, deadline_s=60)
    group = NcclGroup(exchange, device)
    for count in (1, 17, 4096, 1 << 22):
        told = torch.empty((ranks, count), dtype=torch.bfloat16, device=device)
        group.all_gather(torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device=device), told)
        assert [set(row.tolist()) for row in told.cpu()] == [{other + 1.0} for other in range(ranks)], count
    own = torch.zeros(64, dtype=torch.int32, device=device)
    told = torch.empty((ranks, 64), dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.all_gather(own, told)
    for number in range(20):
        own.fill_(100 * number + rank)
        graph.replay()
        assert told.cpu().tolist() == [[100 * number + other] * 64 for other in range(ranks)]
    torch.cuda.synchronize()
    exchange.gather(b"", "all have ended")
    exchange.close()


if __name__ == "__main__":
    main()
