"""Block tables and known tokens of every lane, on the device; kept up to date by deltas.

A step sends only the changes since the step before it: a new sequence's blocks and tokens, a block that a decode grew
into. The device itself writes sampled tokens here, so the next step reads them before the host has seen them. Mirrors
`InputBatch`; knows no model. Used by `device_step.py` and the parts of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync.runner.input_batch import InputBatch


class DeviceLanes:
    """See the module.

    Attributes:
        flat: int32, tables and then tokens; the indices of `deltas` and `after` point into it.
        tables: int32 [lanes, max_blocks], a view.
        tokens: int32 [lanes, max_tokens], a view.
        lengths: int32 [lanes], of sequences that decode: position of the last token, whose KV is not there yet. Kept
            where steps may have drafts.
        drafted: int32 [lanes], how many drafts the model's own layers have written behind the token there.
        states: [lanes, depths, D], hidden states of the last position before the next step, for multi-token prediction
            layers; None: the model has none.
    """

    def __init__(self, table: InputBatch, device: torch.device, states: torch.Tensor | None = None) -> None:
        lanes, blocks = table.blocks.shape
        self._max_tokens = table.tokens.shape[1]
        self._first_token = lanes * blocks
        self.flat = torch.zeros(self._first_token + lanes * self._max_tokens, dtype=torch.int32, device=device)
        self.tables = self.flat[: self._first_token].view(lanes, blocks)
        self.tokens = self.flat[self._first_token :].view(lanes, self._max_tokens)
        self.lengths = torch.zeros(lanes, dtype=torch.int32, device=device)
        self.drafted = torch.zeros(lanes, dtype=torch.int32, device=device)
        self.states = states

    def mirror(self, table: InputBatch) -> None:
        """Copy the whole table; waits for the device. For start-up, where no step builds on another."""
        self.tables.copy_(torch.from_numpy(table.blocks))
        self.tokens.copy_(torch.from_numpy(table.tokens))

    def deltas(self, step: RunStep, table: InputBatch) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The changes of a step, after `table.plan(step)`: indices into `flat`, and values."""
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
        if step.appends:
            lanes = np.array([table.lane_of(append.key) for append in step.appends])
            columns = table.num_blocks[lanes] - 1
            if len(set(lanes.tolist())) < len(lanes):
                # several blocks of a lane: each entry has those before it that come behind it in the step
                behind = np.tril(lanes[:, None] == lanes[None, :], -1).sum(axis=0)
                columns -= behind
            indices.append(lanes * width + columns)
            values.append(table.blocks[lanes, columns])
        if not indices:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(indices), np.concatenate(values)

    def after(self, lanes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into `flat` of the tokens at these positions; -1 past the end of a context, where no step reads."""
        index = self._first_token + lanes * self._max_tokens + positions
        return np.where(positions < self._max_tokens, index, -1)
