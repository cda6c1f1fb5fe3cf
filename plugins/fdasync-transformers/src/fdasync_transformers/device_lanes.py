"""Block tables and known tokens of every lane, on the device; kept up to date by deltas.

A step sends what changed since the one before it (a new sequence's blocks and tokens, a block that a decode grew
into) and nothing of what did not. Sampled tokens are written here by the device itself, which is how the next step
reads them before the host has seen them. Mirrors `LaneTable`; knows no model. Used by `device_step.py` and
`device_executor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import LaneTable


class DeviceLanes:
    """Attributes:
    flat: int32, tables and then tokens: what indices of `deltas` and `after` point into.
    tables: int32 [lanes, max_blocks], a view.
    tokens: int32 [lanes, max_tokens], a view.
    """

    def __init__(self, table: LaneTable, device: torch.device) -> None:
        lanes, blocks = table.blocks.shape
        self._max_tokens = table.tokens.shape[1]
        self._first_token = lanes * blocks
        self.flat = torch.zeros(self._first_token + lanes * self._max_tokens, dtype=torch.int32, device=device)
        self.tables = self.flat[: self._first_token].view(lanes, blocks)
        self.tokens = self.flat[self._first_token :].view(lanes, self._max_tokens)

    def mirror(self, table: LaneTable) -> None:
        """Take over the whole table; waits for the device. For start-up, where steps stand alone."""
        self.tables.copy_(torch.from_numpy(table.blocks))
        self.tokens.copy_(torch.from_numpy(table.tokens))

    def deltas(self, step: RunStep, table: LaneTable) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """What a step changes, once `table.plan(step)` has taken it in: indices into `flat`, and values."""
        indices: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        width = table.blocks.shape[1]

        def put(first: int, entries: NDArray[np.int32]) -> None:
            indices.append(np.arange(first, first + len(entries)))
            values.append(entries)

        for start in step.starts:
            lane = table.lane_of(start.key)
            put(lane * width, table.blocks[lane, : table.num_blocks[lane]])
            put(self._first_token + lane * self._max_tokens, table.tokens[lane, : table.known[lane]])
        grown = [table.lane_of(append.key) for append in step.appends]
        if grown:
            lanes = np.array(grown)
            columns = table.num_blocks[lanes] - 1
            indices.append(lanes * width + columns)
            values.append(table.blocks[lanes, columns])
        if not indices:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(indices), np.concatenate(values)

    def after(self, lanes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into `flat` of the tokens at these positions; -1 past the end of a context, which nothing reads."""
        index = self._first_token + lanes * self._max_tokens + positions
        return np.where(positions < self._max_tokens, index, -1)
