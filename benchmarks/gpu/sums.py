"""Times of one all-reduce, and of the exchange at the end of a step, over the GPUs of this machine: part s of `gpu_tp`.

    python -m benchmarks.gpu.sums all RANKS HIDDEN SIZES OUT

Starts a process for each rank, on a GPU of its own. Times are of graphs of many of them on devices that do nothing
else, so the ranks never wait for work of another; rank 0 writes them. Called by `tp.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fdasync_kernels.collectives.all_reduce import all_reduce
from fdasync_kernels.collectives.gather import gather
from fdasync_kernels.collectives.peer_memory import Group, PeerMemory

from fdasync.gpu.peers import OpenedPeers, fewest_multiprocessors
from fdasync.ipc.exchange import Exchange, Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMIT_S = 100.0
# of one graph, and replays of it: the first two are not timed
_CALLS, _REPLAYS = 40, 9
# of a step of 256 samples
_MESSAGE_ELEMENTS = 32 + 256


def start(ranks: int, arguments: list[str]) -> None:
    """Run all ranks. Raises SystemExit where one fails."""
    meeting = Meeting(ranks)
    command = [sys.executable, "-m", "benchmarks.gpu.sums", "rank"]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *arguments, *map(str, meeting.fds(rank))],
            pass_fds=meeting.fds(rank),
            env={**os.environ, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"},
        )
        for rank in range(ranks)
    ]
    try:
        codes = [one.wait(timeout=_LIMIT_S) for one in children]
    finally:
        for one in children:
            one.kill()
            one.wait()
        meeting.close()
    if any(codes):
        raise SystemExit(f"exit status of the ranks: {codes}")


def be_rank(rank: int, ranks: int, hidden: int, sizes: list[int], out: str, fds: list[int]) -> None:
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
    message = torch.zeros(_MESSAGE_ELEMENTS, dtype=torch.int32, device=device)
    found["sum_message_us"] = graph_us(lambda: gather(message, memory), exchange)
    if not rank:
        Path(out).write_text(json.dumps(found))
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


def main() -> None:
    kind, *given = sys.argv[1:]
    if kind == "all":
        start(int(given[0]), given[1:])
        return
    rank, ranks, hidden, sizes, out, *fds = given
    be_rank(int(rank), int(ranks), int(hidden), list(map(int, sizes.split(","))), out, list(map(int, fds)))


if __name__ == "__main__":
    main()
