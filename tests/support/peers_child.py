"""One rank of a group whose devices sum tensors: checks its sums, in a process of its own. The program's arguments are
rank, number of ranks, and the descriptors of `Meeting.fds`."""

from __future__ import annotations

import sys

import torch

from fdasync.gpu.kernels.collectives.all_reduce import all_reduce
from fdasync.gpu.kernels.collectives.digest import PARTS, digest_rows
from fdasync.gpu.kernels.collectives.gather import gather
from fdasync.gpu.peers import OpenedPeers
from fdasync.ipc.exchange import Exchange


def inputs(ranks: int, count: int, dtype: torch.dtype, *, seed: int) -> list[torch.Tensor]:
    """What each rank gives, on the CPU."""
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=noise).to(dtype) for _ in range(ranks)]


def wanted(given: list[torch.Tensor]) -> torch.Tensor:
    """Added up in order, in float32, and rounded once."""
    total = torch.zeros_like(given[0], dtype=torch.float32)
    for x in given:
        total += x.float()
    return total.to(given[0].dtype)


def main() -> None:
    rank, ranks, *fds = map(int, sys.argv[1:])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    exchange = Exchange(rank, ranks, fds, deadline_s=60)
    opened = OpenedPeers(exchange, device)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (8, 2048, 8 * 12345, 8 * 1234567):
            given = inputs(ranks, count, dtype, seed=count)
            mine = given[rank].to(device)
            for way in ("one_shot", "two_shot", "auto"):
                for _ in range(4):
                    total = all_reduce(mine, opened.memory, way=way)
                    assert torch.equal(total.cpu(), wanted(given)), (dtype, count, way)
    # a graph of two sums, replayed; the numbers change in place
    given = inputs(ranks, 4096, torch.bfloat16, seed=1)
    mine = given[rank].to(device)
    exchange.gather(b"", "before the graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = all_reduce(mine, opened.memory)
        twice = all_reduce(once, opened.memory)
    for _ in range(20):
        graph.replay()
    first = wanted(given)
    assert torch.equal(once.cpu(), first)
    assert torch.equal(twice.cpu(), wanted([first] * ranks))
    # messages stand between replays, and digests tell equal rows from others
    rows = torch.arange(50_000, device=device).to(torch.uint8)
    message = torch.empty(PARTS + 40, dtype=torch.int32, device=device)
    for number in range(20):
        graph.replay()
        digest_rows(rows, message[:PARTS], number)
        message[PARTS:] = 100 * number + rank
        told = gather(message, opened.memory).cpu()
        assert (told[:, :PARTS] == told[0, :PARTS]).all()
        assert told[:, PARTS:].tolist() == [[100 * number + other] * 40 for other in range(ranks)]
    rows[41_234] += rank
    digest_rows(rows, message[:PARTS], 0)
    told = gather(message, opened.memory).cpu()
    assert (told[1:, :PARTS] != told[0, :PARTS]).any(1).all()
    torch.cuda.synchronize()
    exchange.gather(b"", "all have ended")
    opened.close()
    opened.close()
    exchange.close()


if __name__ == "__main__":
    main()
