"""Times calls in a CUDA graph, where launches cost the host nothing. Used by `gpu_experts.py` and `gpu_sampler.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# replays that do not count
_WARM = 2


def seconds_in_graph(calls: Sequence[Callable[[], object]], device: torch.device, replays: int) -> list[float]:
    """Seconds of a call, in each replay of a graph of all of them; on a CPU those of the first call, once.

    The first calls run before the capture, so that kernels are compiled. Waits for the device.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        calls[0]()
        return [time.perf_counter() - started]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:_WARM]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for number in range(replays + _WARM):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        if number >= _WARM:
            took.append(float(began.elapsed_time(ended)) / 1e3 / len(calls))
    graph.reset()
    return took
