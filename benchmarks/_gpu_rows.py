"""The part of `gpu_attention` about drafts: four rows a sequence in tiles, or each row as a decode of its own.

Both attend the same queries to the same keys, timed in alternation, so that a slow moment of the machine falls on both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fdasync_kernels.attention.decode import attend_decode, decode_workspace
from fdasync_kernels.attention.decode_rows import attend_rows, row_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._gpu_attention_rig import Rig
    from benchmarks._report import Report

ROWS = 4


def _work(rig: Rig, sequences: int, length: int, shape: tuple[int, int], *, tiled: bool) -> Callable[[], object]:
    """All layers' decode of the last ROWS tokens of each sequence; `shape`: heads and their dimensions."""
    heads, dim = shape
    tables = rig.tables(sequences, length)
    lanes = torch.arange(sequences, dtype=torch.int32, device=rig.device).repeat_interleave(ROWS)
    positions = (length - ROWS + torch.arange(ROWS, device=rig.device)).repeat(sequences)
    query = torch.randn(sequences * ROWS, heads, dim, device=rig.device).bfloat16()
    out = torch.empty_like(query)
    workspace = decode_workspace(len(query), heads, dim, rig.device)

    def run() -> None:
        tiles = row_tiles(lanes, positions, ROWS) if tiled else None
        for keys, values in zip(rig.keys, rig.values, strict=True):
            if tiles is None:
                attend_decode(
                    query, keys, values, tables, lanes, positions, scale=dim**-0.5, reach_kind="full", reach_size=0,
                    sinks=None, out=out, workspace=workspace,
                )  # fmt: skip
            else:
                attend_rows(
                    query, keys, values, tables, lanes, positions, tiles, rows=ROWS, scale=dim**-0.5,
                    reach_kind="full", reach_size=0, sinks=None, out=out, workspace=workspace,
                )  # fmt: skip

    return rig.graph(run)


def measure_rows(rig: Rig, rounds: int, shape: tuple[int, int], report: Report) -> None:
    """Adds `rows_us_*` of tiles, `rows_single_us_*` of rows one by one, and `rows_ratio_*`, the first over the second,
    round by round."""
    layers = rig.sizes.layers
    for count, length in rig.sizes.decodes:
        works = [_work(rig, count, length, shape, tiled=tiled) for tiled in (True, False)]
        times: list[list[float]] = [[], []]
        for number in range(2 * rounds + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                us = rig.ms(works[which]) * 1e3 / layers
                if number:
                    times[which].append(us)
        name = f"{count}x{length}"
        report.add(f"rows_us_{name}", times[0])
        report.add(f"rows_single_us_{name}", times[1])
        report.add(f"rows_ratio_{name}", [one / other for one, other in zip(*times, strict=True)], aim=1.0)
