"""Host memory, device memory and copies between them, as a runner has them. Used by `gpu_copies`."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena
    from fdasync.gpu.block_copies import BlockCopies, Way
    from fdasync.gpu.block_rows import Lane
    from fdasync.gpu.streams import Streams


@dataclass(frozen=True)
class Sizes:
    """How large everything is; a rehearsal may take less."""

    block_elements: int = 16 * 48 * 2 * 4 * 128
    blocks: int = 2000
    host_blocks: int = 512
    counts: tuple[int, ...] = (1, 16, 64, 256)
    product: int = 8192
    loop_nbytes: int = 4 << 30
    long_call: int = 1000


@dataclass
class Rig:
    """What is measured, and figures as they come."""

    device: torch.device
    sizes: Sizes
    pool: torch.Tensor
    host: HostArena
    streams: Streams
    copies: BlockCopies
    ways: dict[str, Way]
    pinned: torch.Tensor
    rng: np.random.Generator
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def scattered(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.rng.permutation(self.sizes.blocks)[:count], self.rng.permutation(self.sizes.host_blocks)[:count]

    def timed(self, lane: Lane, way: Way, device: NDArray[np.int64], host: NDArray[np.int64]) -> tuple[float, float]:
        """As the function below, of copies of these blocks."""
        return timed(self, lane, lambda: submit(way, lane, device, host))


def timed(rig: Rig, lane: Lane, launch: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the device, from before the launch to its end, and CPU seconds of the launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with rig.streams.on(lane):
        rig.streams.record(lane, start)
        cpu = time.thread_time()
        launch()
        cpu = time.thread_time() - cpu
        rig.streams.record(lane, end)
    end.synchronize()
    return start.elapsed_time(end) / 1e3, cpu


def submit(way: Way, lane: Lane, device: NDArray[np.int64], host: NDArray[np.int64]) -> None:
    """All of it at once, in parts of the way's own size."""
    step = way.at_once
    for first in range(0, len(device), step):
        way.submit(lane, device[first : first + step], host[first : first + step])
