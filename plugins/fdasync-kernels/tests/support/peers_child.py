"""One rank of a group whose devices sum tensors: checks its sums, in a process of its own. The program's arguments are
rank, number of ranks, and the descriptors of `Meeting.fds`."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.gather import gather
from fdasync_kernels.collectives.peer_memory import Group, PeerMemory, row_width
from fdasync_kernels.digest import PARTS, digest_rows
from fdasync_kernels.layer.finish import Norm, add_norm, finish_experts

from fdasync.gpu.peers import OpenedPeers, fewest_multiprocessors
from fdasync.ipc.exchange import Exchange


def inputs(ranks: int, count: int, dtype: torch.dtype, *, seed: int) -> list[torch.Tensor]:
    """What each rank gives, on the CPU."""
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=noise).to(dtype) for _ in range(ranks)]


def wanted(given: list[torch.Tensor]) -> torch.Tensor:
    """Added up as a tree of neighbours, in float32, and rounded once."""
    parts = [x.float() for x in given]
    while len(parts) > 1:
        parts = [sum(parts[first + 1 : first + 2], parts[first]) for first in range(0, len(parts), 2)]
    return parts[0].to(given[0].dtype)


class Block(NamedTuple):
    """What a rank has of a block of a layer. `residual` and `norm` are the same on all ranks."""

    rows: torch.Tensor
    parts: torch.Tensor
    ids: torch.Tensor
    residual: torch.Tensor
    norm: Norm
    num_experts: int = 6


def blocks(ranks: int, rows: int, size: int, dtype: torch.dtype, *, seed: int) -> list[Block]:
    """Of each rank, on the CPU."""
    noise = torch.Generator().manual_seed(seed)
    residual = torch.randn((rows, size), generator=noise).to(dtype)
    norm = Norm((1 + 0.2 * torch.randn(size, generator=noise)).to(dtype), 1e-5)
    ids = torch.randint(0, 6, (rows, 2), generator=noise)
    return [
        Block(
            torch.randn((rows, size), generator=noise).to(dtype),
            torch.randn((rows, 2, size), generator=noise).to(dtype),
            ids,
            residual,
            norm,
        )
        for _ in range(ranks)
    ]


def check_rows(peers: PeerMemory, size: int, device: torch.device) -> None:
    """Sums by the kernels that go on from them have the bits of `all_reduce` and those kernels, in a graph too."""
    rank = peers.rank
    for rows in (1, 7, 64, 256):
        one = blocks(peers.ranks, rows, size, torch.bfloat16, seed=rows)[rank]
        x, parts, ids, residual = (tensor.to(device) for tensor in one[:4])
        norm = Norm(one.norm.weight.to(device), one.norm.eps)
        wanted = add_norm(all_reduce(x, peers), residual, norm)
        alone, _ = finish_experts(parts, ids, one.num_experts, torch.zeros_like(x), None, shared=x)
        with_experts = add_norm(all_reduce(alone, peers), residual, norm)

        def both(
            x: torch.Tensor = x, parts: torch.Tensor = parts, ids: torch.Tensor = ids,
            residual: torch.Tensor = residual, norm: Norm = norm, count: int = one.num_experts,
        ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...]:  # fmt: skip
            first = add_norm(x, residual, norm, peers=peers)
            return first, finish_experts(parts, ids, count, residual, norm, shared=x, peers=peers)

        found = both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        for _ in range(20):
            graph.replay()
        for results in (found, captured):
            for got, want in zip(results, (wanted, with_experts), strict=True):
                assert torch.equal(got[0], want[0]), rows
                assert torch.equal(got[1], want[1]), rows


def main() -> None:
    rank, ranks, *fds = map(int, sys.argv[1:])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    exchange = Exchange(rank, ranks, fds, deadline_s=60)
    group = Group(ranks, fewest_multiprocessors(exchange, device), row_width(2048) * 2)
    opened = OpenedPeers(exchange, device, group.nbytes())
    peers = PeerMemory(rank, opened.addresses, device, group)
    check_rows(peers, 2048, device)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (8, 2048, 8 * 12345, 8 * 1234567):
            given = inputs(ranks, count, dtype, seed=count)
            mine = given[rank].to(device)
            for way in ("one_shot", "two_shot", "auto"):
                for _ in range(4):
                    total = all_reduce(mine, peers, way=way)
                    assert torch.equal(total.cpu(), wanted(given)), (dtype, count, way)
        # NaNs whose bits are those of an empty slot come as any other, and are not waited for
        given = inputs(ranks, 8 * 1234, dtype, seed=1)
        for x in given:
            x.view(torch.int32)[::97] = -1
        for way in ("one_shot", "two_shot", "auto"):
            total = all_reduce(given[rank].to(device), peers, way=way).cpu()
            assert torch.equal(total.isnan(), wanted(given).isnan()), (dtype, way)
            assert torch.equal(total.nan_to_num(), wanted(given).nan_to_num()), (dtype, way)
    # a graph of two sums, replayed; the numbers change in place
    given = inputs(ranks, 4096, torch.bfloat16, seed=1)
    mine = given[rank].to(device)
    exchange.gather(b"", "before the graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = all_reduce(mine, peers)
        twice = all_reduce(once, peers)
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
        told = gather(message, peers).cpu()
        assert (told[:, :PARTS] == told[0, :PARTS]).all()
        assert told[:, PARTS:].tolist() == [[100 * number + other] * 40 for other in range(ranks)]
    rows[41_234] += rank
    digest_rows(rows, message[:PARTS], 0)
    told = gather(message, peers).cpu()
    assert (told[1:, :PARTS] != told[0, :PARTS]).any(1).all()
    torch.cuda.synchronize()
    exchange.gather(b"", "all have ended")
    opened.close()
    opened.close()
    exchange.close()


if __name__ == "__main__":
    main()
