"""Times of one all-reduce over the GPUs of this machine: part s of `gpu_tp`.

    python -m benchmarks.gpu.sums RANK RANKS HIDDEN SIZES FD...

is one rank, on a GPU of its own; `measure` starts all of them. Times are of graphs of many sums on devices that do
nothing else, so the ranks never wait for work of another; rank 0 prints them as JSON. Called by `tp.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.peer_memory import Group, PeerMemory

from fdasync.gpu.peers import OpenedPeers, fewest_multiprocessors
from fdasync.ipc.exchange import Exchange, Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LIMIT_S = 100.0
# of one graph, and replays of it: the first two are not timed
_CALLS, _REPLAYS = 40, 9


def measure(ranks: int, hidden: int, sizes: Sequence[int]) -> dict[str, float]:
    """Microseconds of a sum of so many tokens' hidden states, by figure. Raises RuntimeError where a rank fails."""
    meeting = Meeting(ranks)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.sums", *map(str, (rank, ranks, hidden, ",".join(map(str, sizes)))),
             *map(str, meeting.fds(rank))],
            stdout=subprocess.PIPE,
            pass_fds=meeting.fds(rank),
            env={**os.environ, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=_LIMIT_S)[0] for one in children]
    finally:
        for one in children:
            one.kill()
            one.wait()
        meeting.close()
    if any(one.returncode for one in children):
        raise RuntimeError(f"exit status of the ranks: {[one.returncode for one in children]}")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def be_rank(rank: int, ranks: int, hidden: int, sizes: list[int], fds: list[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange = Exchange(rank, ranks, fds, deadline_s=_LIMIT_S)
    group = Group(ranks, fewest_multiprocessors(exchange, device))
    opened = OpenedPeers(exchange, device, group.nbytes())
    memory = PeerMemory(rank, opened.addresses, device, group)
    found: dict[str, float] = {}
    for size in sizes:
        x = torch.zeros((size, hidden), dtype=torch.bfloat16, device=device)
        found[f"sum_us_{size}"] = graph_us(lambda x=x: all_reduce(x, memory, out=x), exchange)
    if not rank:
        print(json.dumps(found))
    exchange.gather(b"", "all have ended")


def graph_us(call: Callable[[], object], exchange: Exchange) -> float:
    """Median microseconds of one call. Every rank calls it at the same time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    exchange.gather(b"", "compiled")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CALLS):
            call()
    times = []
    for _ in range(_REPLAYS + 2):
        torch.cuda.synchronize()
        exchange.gather(b"", "a replay")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return round(statistics.median(times[2:]), 2)


if __name__ == "__main__":
    rank, ranks, hidden, sizes, *fds = sys.argv[1:]
    be_rank(int(rank), int(ranks), int(hidden), list(map(int, sizes.split(","))), list(map(int, fds)))
