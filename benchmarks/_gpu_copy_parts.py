"""The part of `gpu_copies` about ranks: copies of an n-th of each host block, for a pool that holds this part alone.

A rank's pool has rows of a part's size, and every row goes to its offset in the host's whole blocks: as many copies as
of whole blocks, and an n-th of the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._gpu_copy_rig import Rig
    from fdasync.gpu.block_copies import Way
    from fdasync.gpu.block_rows import Lane

#: of whose blocks a part is copied
RANKS = (2, 4)


class Parts:
    """Copies by `make(rows, host addresses)`, for each of RANKS; their last rank's part."""

    def __init__(self, rig: Rig, addresses: np.ndarray, make: Callable[[torch.Tensor, np.ndarray], Way]) -> None:
        self._rig = rig
        self._ways: dict[int, tuple[Way, torch.Tensor, slice]] = {}
        for ranks in RANKS:
            size = rig.host.block_nbytes // ranks
            rows = rig.pool.view(torch.uint8).view(-1)[: rig.sizes.blocks * size].view(rig.sizes.blocks, size)
            first = (ranks - 1) * size
            self._ways[ranks] = (make(rows, addresses + np.uint64(first)), rows, slice(first, first + size))

    def check(self) -> None:
        """The right bytes move out, and those beside them stay; void otherwise."""
        rig = self._rig
        for ranks, (way, rows, part) in self._ways.items():
            device, host = rig.scattered(7)
            rig.host.kv[host] = 1
            _, _ = rig.timed("copy_out", way, device, host)
            wanted = rows[torch.from_numpy(device).to(rig.device)].cpu().numpy()
            if not np.array_equal(rig.host.kv[host, part], wanted) or (rig.host.kv[host, : part.start] != 1).any():
                raise SystemExit(f"parts of {ranks} ranks copied other bytes out: nothing was measured")

    def measure(self, measured: tuple[tuple[Lane, str], ...], kept: bool) -> None:
        """One round: GB/s of `part<ranks>_<direction>_<blocks>`, and its share of whole blocks' rate, to be set beside
        `out_*` and `in_*` of the same round."""
        rig = self._rig
        for lane, short in measured:
            for count in rig.sizes.counts:
                for ranks, (way, rows, _) in self._ways.items():
                    took, cpu = rig.timed(lane, way, *rig.scattered(count))
                    if kept:
                        rig.values[f"part{ranks}_{short}_{count}"].append(count * rows.shape[1] / took / 1e9)
                        rig.values[f"cpu_us_part{ranks}_{short}_{count}"].append(cpu * 1e6 / count)
