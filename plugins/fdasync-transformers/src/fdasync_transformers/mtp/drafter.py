"""Drafts tokens with the model's multi-token prediction (MTP) layers, step by step, over the paged KV.

After the model's pass, a layer's pass goes over the same positions: its KV of a position p is made of the token at p
and a hidden state of p - 1, so it is complete where the model's is. Hidden states of the position before a step come
from the block that holds it (`mtp/specs.py`); nothing is kept between steps, so that cached blocks, preempted sequences
and restarts need nothing else. Drafts are further rows behind the sampled token. Their KV is written to the blocks too,
past the positions that stand: the next step writes it again. Knows lanes and blocks; knows no scheduling and no
sampling. Made and called by `execution/host_executor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.attention import NAME
from fdasync_transformers.model.kv import fresh_tails
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.mtp.specs import LAYERS, carry_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from transformers import PreTrainedConfig, PreTrainedModel

    from fdasync.runner.input_batch import Batch, InputBatch
    from fdasync_transformers.model.attention import StepContext
    from fdasync_transformers.model.head import Head
    from fdasync_transformers.model.kv import KVLayout, KVPool

    Ints = NDArray[np.int64]
    Choose = Callable[[Callable[[], torch.Tensor], Ints, Ints], NDArray[np.int32]]


class Passes(Protocol):
    """What the drafter uses of a step model."""

    model: PreTrainedModel
    layout: KVLayout
    head: Head

    def inference(self) -> AbstractContextManager[None]: ...

    def context(
        self, counts: Ints, starts: Ints, positions: Ints, kv_index: Ints, tables: NDArray[np.integer], pool: KVPool
    ) -> StepContext: ...


class Drafted(NamedTuple):
    """Drafts of a step's S sequences.

    Attributes:
        counts: int64 [S], drafts of each.
        tokens: int32 [S, most of them], the tokens behind the sampled one; past a sequence's count 0.
    """

    counts: Ints
    tokens: NDArray[np.int32]


class _States(NamedTuple):
    """Hidden states of a pass: of sequence s, rows from `rows[s]` on are of the positions from `firsts[s]` on."""

    values: torch.Tensor
    firsts: Ints
    rows: Ints


class _Step(NamedTuple):
    """The parts of a step that all its passes share: of S sequences, the positions from `starts` to `ends` stand."""

    lanes: Ints
    starts: Ints
    ends: Ints
    drafts: Ints
    table: InputBatch
    pool: KVPool

    def blocks_at(self, sequences: Ints, positions: Ints) -> Ints:
        """The block of a position of a sequence."""
        columns = positions // self.pool.block_tokens
        return self.table.blocks[self.lanes[sequences], columns].astype(np.int64)


class MtpDrafter:
    """See the module. One for each step model; holds nothing between steps."""

    def __init__(self, passes: Passes, total: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """`passes` is a step model whose model has MTP layers and whose layout has their specs; their attention
        implementation is set here. `total` sums a tensor over the ranks of a group, which all make the same calls of
        this object; None: there is one process. Raises InvariantBroken for another model."""
        head, carry = head_of(passes.model), carry_of(passes.layout)
        if head is None or carry is None:
            raise InvariantBroken("a drafter of a model without MTP layers")
        config: PreTrainedConfig = head.config
        config._attn_implementation = NAME
        config._experts_implementation = passes.model.config._experts_implementation
        self._passes = passes
        self._head = head
        self._carry = carry.index
        self._total = total
        self._layers = [layer for layer in passes.layout.layers if layer.group == LAYERS]
        self._width = int(passes.model.config.hidden_size)

    def step(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        stands: Ints,
        most: Ints,
        table: InputBatch,
        pool: KVPool,
        choose: Choose | None = None,
    ) -> Drafted:
        """Store the layers' KV of a step's positions that stand, and draft. Call it once after each step's pass, inside
        `Head.keeping` of that pass, with the sampled tokens in `table.tokens`. Queued on the current stream.

        Args:
            hidden: [T, D], the model's last hidden states of the step's tokens (`Head.hidden`).
            batch: the step.
            stands: int64 [S], how many of each sequence's positions stand, the first ones; 1 at least. What the step
                computed past them (rejected drafts) leaves nothing.
            most: int64 [S], most drafts of each; 0 where the step sampled nothing. A sequence gets fewer where its
                block table has no room for the KV of as many rows.
            table, pool: of the executor.
            choose: picks the draft of each row: what computes logits [n, V], int64 [n] sequences of the step, int64 [n]
                positions of the drafts. None: the most likely token. On all ranks of a group it picks the same.

        Raises InvariantBroken where a sequence stands at no position.
        """
        if not (stands >= 1).all():
            raise InvariantBroken("a sequence of a step stands at none of its positions")
        ends = batch.starts + stands
        room = table.num_blocks[batch.lanes] * pool.block_tokens - ends
        step = _Step(batch.lanes, batch.starts, ends, np.clip(np.minimum(most, room), 0, None), table, pool)
        deepest = int(step.drafts.max(initial=0))
        tokens = np.zeros((len(ends), deepest), np.int32)
        if deepest:
            tables = table.blocks[batch.lanes, : int((ends + step.drafts).max()) // pool.block_tokens + 1]
            pool.clear(fresh_tails(ends, ends + step.drafts, tables, pool.block_tokens))
        self._clear_firsts(step)
        carried = self._carried(step)
        # of the model, then of each layer
        states = [_States(hidden, batch.starts, np.cumsum(batch.counts) - batch.counts)]
        with self._passes.inference():
            for depth in range(max(len(self._layers), deepest)):
                made = self._pass(depth, step, states[-1], carried, tokens)
                if made is None:
                    break
                if depth < deepest:
                    self._draft(depth, step, made, tokens, choose)
                states.append(made)
        self._keep(step, states[: len(self._layers)])
        return Drafted(step.drafts, tokens)

    def _pass(
        self, depth: int, step: _Step, before: _States, carried: torch.Tensor, tokens: NDArray[np.int32]
    ) -> _States | None:
        """The pass of the layer at this depth: over the positions that stand, and as many rows behind them as the
        drafts so far allow. Past the last layer, that layer goes over the last of these rows alone."""
        last = len(self._layers) - 1
        number = min(depth, last)
        drafting = step.drafts > depth
        firsts = np.maximum(step.starts, depth + 1) if depth <= last else step.ends + depth
        stops = np.where(drafting, step.ends + depth + 1, step.ends)
        counts = np.maximum(stops - firsts, 0)
        chosen = np.flatnonzero(counts)
        if not len(chosen):
            # of a later layer too: positions of the first tokens alone
            return None if depth >= last else _States(before.values[:0], firsts, np.zeros_like(firsts))
        rows = np.cumsum(counts) - counts
        sequences = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(sequences)) + np.repeat(firsts - rows, counts)
        size = step.pool.block_tokens
        context = self._passes.context(
            counts[chosen],
            firsts[chosen],
            positions,
            step.blocks_at(sequences, positions) * size + positions % size,
            step.table.blocks[step.lanes[chosen], : int(positions.max()) // size + 1],
            step.pool,
        )
        device = before.values.device
        # rows of the pass before, or what the block before carries
        inside = positions - 1 >= before.firsts[sequences]
        own = before.rows[sequences] + positions - 1 - before.firsts[sequences]
        source = np.where(inside, own, len(before.values) + sequences)
        given = torch.cat((before.values, carried[:, number]))[_send(source, device)]
        values = self._head.run(
            self._passes.model,
            number,
            _send(_tokens_at(step, sequences, positions, tokens), device),
            context.positions,
            given,
            past_key_values=context.latents if self._layers[number].latent_rank else None,
            fd_ctx=context,
        )
        return _States(values, firsts, rows)

    def _draft(self, depth: int, step: _Step, made: _States, tokens: NDArray[np.int32], choose: Choose | None) -> None:
        """Draft the token of this depth for all sequences that want one, into `tokens`."""
        drafting = np.flatnonzero(step.drafts > depth)
        rows = made.rows[drafting] + step.ends[drafting] + depth - made.firsts[drafting]

        def logits() -> torch.Tensor:
            return self._passes.head.logits_of(made.values[_send(rows, made.values.device)])

        if choose is None:
            tokens[drafting, depth] = logits().argmax(-1).cpu().numpy()
        else:
            tokens[drafting, depth] = choose(logits, drafting, step.ends[drafting] + depth + 1)

    def _carried(self, step: _Step) -> torch.Tensor:
        """Hidden states [S, layers, D] of the position before the step; of sequences that begin here, anything."""
        blocks = step.blocks_at(np.arange(len(step.lanes)), np.maximum(step.starts - 1, 0))
        view = step.pool.keys[self._carry]
        flat = self._whole(view[_send(blocks, view.device)]).flatten(1)
        return flat[:, : len(self._layers) * self._width].view(len(blocks), len(self._layers), self._width)

    def _whole(self, held: torch.Tensor) -> torch.Tensor:
        """What all ranks hold of each block, [n, tokens, shares, 1, width], from this rank's part."""
        layout = self._passes.layout
        if self._total is None or layout.held_shares == layout.shares:
            return held
        whole = held.new_zeros((*held.shape[:2], layout.shares, *held.shape[3:]))
        if layout.writes:
            # one rank adds each share, the others zeros
            whole[:, :, layout.first_share : layout.first_share + layout.held_shares] = held
        return self._total(whole)

    def _keep(self, step: _Step, states: list[_States]) -> None:
        """Write what each block of the step carries: hidden states of its last position that stands, 0 for layers that
        have none there."""
        size = step.pool.block_tokens
        columns = (step.ends - 1) // size - step.starts // size + 1
        sequences = np.repeat(np.arange(len(columns)), columns)
        nth = np.arange(len(sequences)) - np.repeat(np.cumsum(columns) - columns, columns)
        lasts = np.minimum((step.starts[sequences] // size + nth + 1) * size, step.ends[sequences]) - 1
        view = step.pool.keys[self._carry]
        layout = self._passes.layout
        held = slice(layout.first_share, layout.first_share + layout.held_shares)
        whole = view.new_zeros((len(sequences), view.shape[1], layout.shares, *view.shape[3:]))
        made = whole.view(len(sequences), -1)
        for depth, state in enumerate(states):
            # depth d has states from position d on
            have = np.flatnonzero(lasts >= np.maximum(state.firsts[sequences], depth))
            rows = state.rows[sequences[have]] + lasts[have] - state.firsts[sequences[have]]
            part = slice(depth * self._width, (depth + 1) * self._width)
            made[_send(have, view.device), part] = state.values[_send(rows, view.device)].to(view.dtype)
        view[_send(step.blocks_at(sequences, lasts), view.device)] = whole[:, :, held]

    def _clear_firsts(self, step: _Step) -> None:
        """Zero the KV of positions where a layer has none: the block may hold another sequence's."""
        for sequence in np.flatnonzero(step.starts < len(self._layers)).tolist():
            for position in range(int(step.starts[sequence]), min(len(self._layers), int(step.ends[sequence]))):
                block = int(step.table.blocks[step.lanes[sequence], position // step.pool.block_tokens])
                for layer in self._layers[position:]:
                    for views in (step.pool.keys, step.pool.values):
                        if layer.index in views:
                            views[layer.index][block, position % step.pool.block_tokens] = 0


def _tokens_at(step: _Step, sequences: Ints, positions: Ints, drafts: NDArray[np.int32]) -> Ints:
    """Known tokens, and drafts behind the sampled one."""
    behind = positions - step.ends[sequences] - 1
    # a table ends where no draft has room
    known = step.table.tokens[step.lanes[sequences], positions]
    if not drafts.shape[1]:
        return known.astype(np.int64)
    guessed = drafts[sequences, np.clip(behind, 0, drafts.shape[1] - 1)]
    return np.where(behind >= 0, guessed, known).astype(np.int64)


def _send(array: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
