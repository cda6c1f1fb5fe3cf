"""The runner's side of `RunStep`: turns each step's changes into flat numpy arrays that a step can compute on.

It keeps, per sequence, a *lane*: its length, block table and slots. It knows no model. A steady decode step (no joins,
leaves or chunks) costs a handful of vectorised calls, whatever the number of sequences, and some item writes for each
block that is appended. Used by the synthetic runner and by plugins' runners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fdasync.events.actions import BlockAppend, RunStep, SeqStart
    from fdasync.request import SamplerSpec


class Batch:
    """One step, flattened: T tokens of S sequences, sequence after sequence; frozen when planned.

    Attributes:
        step_id: number of the step.
        lanes: int64 [S], the lane of each sequence: decodes first, then chunks.
        counts: int64 [S], tokens of each in this step (1 for decodes, or room for a run, which may be 0; see
            `InputBatch.take_runs`).
        starts: int64 [S], absolute position of each sequence's first token in this step.
        num_decodes: how many of the S are decodes; their first input token is the last sampled token.
        positions: int64 [T], absolute position of each token.
        kv_index: int64 [T], block * block_tokens + offset: where each token's KV goes.
        aux_index: int64 [T], slot * block_tokens + offset: where its rows go (capture off: undefined).
        generations: uint32 [T], of the slots.
        sampled: int64 [N], which of the S sequences sample, in the order of the step's output.
    """

    __slots__ = (
        "aux_index",
        "counts",
        "generations",
        "kv_index",
        "lanes",
        "num_decodes",
        "positions",
        "sampled",
        "starts",
        "step_id",
    )

    def __init__(self, step_id: int, lanes: NDArray[np.int64], counts: NDArray[np.int64], num_decodes: int) -> None:
        self.step_id = step_id
        self.lanes = lanes
        self.counts = counts
        self.num_decodes = num_decodes
        self.starts: NDArray[np.int64]
        self.positions: NDArray[np.int64]
        self.kv_index: NDArray[np.int64]
        self.aux_index: NDArray[np.int64]
        self.generations: NDArray[np.uint32]
        self.sampled: NDArray[np.int64]


class InputBatch:
    """Sequences in the runner, by lane.

    Args:
        max_run_tokens: a decode gets so many positions in a step, or as many as its block table has room for; where it
            is above 1, that may be none.

    Attributes:
        block_tokens: tokens of a block.
        num_blocks: int64 [lanes], blocks of each block table.
        length: int64 [lanes], tokens whose KV is planned; the position of the next one.
        blocks: int32 [lanes, max_blocks], the block tables.
        tokens: int32 [lanes, max_tokens], the known tokens at start (prompt and, when resumed, output). The runner
            keeps the tokens that are sampled later.
        known: int64 [lanes], how many of `tokens` are known.
        samplers: per lane, how to sample.
        keys: per lane, the sequence; -1: none.
    """

    def __init__(
        self, max_running: int, max_context_tokens: int, block_tokens: int, num_blocks: int, max_run_tokens: int = 1
    ) -> None:
        # a lane may be given up and taken again in one step, never two at a time: max_running is enough
        max_blocks = -(-max_context_tokens // block_tokens)
        self.block_tokens = block_tokens
        self._max_run_tokens = max_run_tokens
        self._max_context_tokens = max_context_tokens
        self.length = np.zeros(max_running, np.int64)
        self.known = np.zeros(max_running, np.int64)
        self.num_blocks = np.zeros(max_running, np.int64)
        self.blocks = np.zeros((max_running, max_blocks), np.int32)
        self.tokens = np.zeros((max_running, max_blocks * block_tokens), np.int32)
        self.samplers: list[SamplerSpec | None] = [None] * max_running
        self.keys = [-1] * max_running
        self._slot_of_block = np.full(num_blocks, -1, np.int64)
        self._generation_of_block = np.zeros(num_blocks, np.uint32)
        self._free = list(range(max_running - 1, -1, -1))
        self._lane_of: dict[int, int] = {}
        self._decoding: dict[int, int] = {}
        self._decode_lanes = np.zeros(0, np.int64)
        self._decode_changed = False

    def __len__(self) -> int:
        return len(self._lane_of)

    def plan(self, step: RunStep, widths: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None) -> Batch:
        """Apply a step's delta and flatten it. Raises InvariantBroken on what the contract forbids.

        Args:
            widths: called once the delta is applied: how many positions each of these decoding lanes wants, from 1 to
                `max_run_tokens`; None: that many.
        """
        for key in step.leaves:
            self._leave(key)
        for start in step.starts:
            self._start(start)
        for append in step.appends:
            self._append(append)
        decodes = self._decode_order(step.skips)
        num_decodes = len(decodes)
        if step.chunks:
            chunk_lanes = [self._lane_of[chunk.key] for chunk in step.chunks]
            lanes = np.concatenate([decodes, np.array(chunk_lanes, np.int64)])
            counts = np.ones(len(lanes), np.int64)
            counts[num_decodes:] = [chunk.count for chunk in step.chunks]
        else:
            lanes, counts = decodes, np.ones(num_decodes, np.int64)
        if self._max_run_tokens > 1:
            wanted = self._max_run_tokens if widths is None else widths(decodes)
            counts[:num_decodes] = np.clip(self.room_of(decodes) - self.length[decodes], 0, wanted)
        batch = Batch(step.step_id, lanes, counts, num_decodes)
        self._flatten(batch)
        lasts = [num_decodes + i for i, chunk in enumerate(step.chunks) if chunk.last]
        batch.sampled = np.arange(num_decodes) if not lasts else np.concatenate([np.arange(num_decodes), lasts])
        for chunk in step.chunks:
            if chunk.last:
                self._decoding[chunk.key] = self._lane_of[chunk.key]
                self._decode_changed = True
        return batch

    def take_runs(self, batch: Batch, counts: NDArray[np.int64]) -> None:
        """Keep only the first `counts` [num_decodes] of the positions that each decode of a step had. Call it before
        the next step is planned."""
        self.length[batch.lanes[: batch.num_decodes]] = batch.starts[: batch.num_decodes] + counts

    def lane_of(self, key: int) -> int:
        """The lane of a sequence that is here. Raises KeyError."""
        return self._lane_of[key]

    def block_table(self, lane: int, tokens: int) -> NDArray[np.int32]:
        """Block ids that hold the first `tokens` tokens of a lane (a view)."""
        return self.blocks[lane, : -(-tokens // self.block_tokens)]

    def room_of(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position of each lane that its block table, or a context, has no room for."""
        return np.minimum(self.num_blocks[lanes] * self.block_tokens, self._max_context_tokens)

    def slots_of(self, blocks: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Slot and generation that each block was last written with (for tests that watch them)."""
        return self._slot_of_block[blocks], self._generation_of_block[blocks]

    def place(self, blocks: tuple[int, ...], slots: tuple[int, ...], generations: tuple[int, ...]) -> None:
        """These blocks were filled by a copy, and keep the slots that they were written with."""
        if slots:
            ids = list(blocks)
            self._slot_of_block[ids] = slots
            self._generation_of_block[ids] = generations

    def _decode_order(self, skips: tuple[int, ...]) -> NDArray[np.int64]:
        if self._decode_changed:
            self._decode_lanes = np.fromiter(self._decoding.values(), np.int64, len(self._decoding))
            self._decode_changed = False
        if not skips:
            return self._decode_lanes
        skipped = set(skips)
        return np.array([lane for key, lane in self._decoding.items() if key not in skipped], np.int64)

    def _flatten(self, batch: Batch) -> None:
        size = self.block_tokens
        batch.starts = self.length[batch.lanes]
        if len(batch.lanes) == batch.num_decodes and self._max_run_tokens == 1:
            batch.positions = batch.starts
            token_lanes = batch.lanes
        else:
            token_lanes = np.repeat(batch.lanes, batch.counts)
            first = np.cumsum(batch.counts) - batch.counts
            batch.positions = np.arange(len(token_lanes)) + np.repeat(batch.starts - first, batch.counts)
        self.length[batch.lanes] += batch.counts
        if (self.length[batch.lanes] > self.num_blocks[batch.lanes] * size).any():
            raise InvariantBroken(f"step {batch.step_id} runs past the end of a block table")
        columns, offsets = np.divmod(batch.positions, size)
        blocks = self.blocks[token_lanes, columns]
        batch.kv_index = blocks.astype(np.int64) * size + offsets
        batch.aux_index = self._slot_of_block[blocks] * size + offsets
        batch.generations = self._generation_of_block[blocks]

    def _start(self, start: SeqStart) -> None:
        if start.key in self._lane_of:
            raise InvariantBroken(f"sequence {start.key} started twice")
        lane = self._free.pop()
        self._lane_of[start.key] = lane
        tokens = np.frombuffer(start.tokens, "<i4")
        self.tokens[lane, : len(tokens)] = tokens
        self.known[lane] = len(tokens)
        self.length[lane] = start.num_cached
        self.num_blocks[lane] = 0
        self.samplers[lane] = start.sampler
        self.keys[lane] = start.key
        cached = start.num_cached // self.block_tokens
        self._add_blocks(lane, start.blocks[:cached], (), ())
        self._add_blocks(lane, start.blocks[cached:], start.slots, start.generations)

    def _append(self, append: BlockAppend) -> None:
        # one item at a time: an array of each would cost several times as much
        lane, block = self._lane_of[append.key], append.block
        count = self.num_blocks[lane]
        self.blocks[lane, count] = block
        self.num_blocks[lane] = count + 1
        self._slot_of_block[block] = append.slot
        self._generation_of_block[block] = append.generation

    def _add_blocks(
        self, lane: int, blocks: tuple[int, ...], slots: tuple[int, ...], generations: tuple[int, ...]
    ) -> None:
        first = int(self.num_blocks[lane])
        self.blocks[lane, first : first + len(blocks)] = blocks
        self.num_blocks[lane] = first + len(blocks)
        self.place(blocks, slots, generations)

    def _leave(self, key: int) -> None:
        lane = self._lane_of.pop(key, -1)
        if lane < 0:
            raise InvariantBroken(f"sequence {key} left but was never started")
        if self._decoding.pop(key, None) is not None:
            self._decode_changed = True
        self.samplers[lane] = None
        self.keys[lane] = -1
        self._free.append(lane)
