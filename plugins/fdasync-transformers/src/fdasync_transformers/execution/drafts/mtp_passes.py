"""The passes of multi-token prediction (MTP) layers: over a step's rows, and over drafts' rows.

In a step the layers go over the model's own rows, with the hidden state of the row before. So their KV of a position
comes of the pass whose row of it stands, a graph of the step holds them too, and nothing of it depends on what is
sampled (docs/design.md, rule 43). What the step leaves of each sequence, the states of its last position that stands,
is kept by lane; blocks carry it too (`mtp/specs.py`), and a sequence that starts on cached blocks gets it from there.
Knows lanes and blocks; knows no steps and no sampling. Made by `execution/step.py`, which calls it in every
pass; what follows a step is called by `execution/drafts/own_drafts.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.attention import NAME
from fdasync_transformers.mtp.specs import LAYERS, carry_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fdasync_kernels.step_kernels import StepKernels
    from transformers import PreTrainedConfig, PreTrainedModel

    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.step_shape import DeviceBatch
    from fdasync_transformers.model.attention import StepContext
    from fdasync_transformers.model.kv import KVLayout, KVPool
    from fdasync_transformers.mtp.head import MtpHead
    from fdasync_transformers.parallel.collectives import Collectives


class DevicePasses(Protocol):
    """What the passes use of a step model."""

    model: PreTrainedModel
    layout: KVLayout
    kernels: StepKernels

    def inference(self) -> AbstractContextManager[None]: ...


class DeviceMtp:
    """See the module.

    Attributes:
        layers: how many there are.
    """

    def __init__(self, passes: DevicePasses, head: MtpHead) -> None:
        """`head` is a part of the model of `passes`; its attention implementation is set here.

        Raises InvariantBroken for a layout without its specs."""
        carry = carry_of(passes.layout)
        if carry is None:
            raise InvariantBroken("passes of prediction layers whose KV is not in the layout")
        config: PreTrainedConfig = head.config
        config._attn_implementation = NAME
        config._experts_implementation = passes.model.config._experts_implementation
        self._passes = passes
        self._head = head
        self._carry = carry.index
        self._specs = [layer for layer in passes.layout.layers if layer.group == LAYERS]
        self.layers = len(self._specs)

    def new_states(self, lanes: int, device: torch.device) -> torch.Tensor:
        """New memory for `DeviceLanes.states`."""
        model = self._passes.model
        return torch.zeros(lanes, self.layers, int(model.config.hidden_size), dtype=model.dtype, device=device)

    def over_step(
        self, hidden: torch.Tensor, ids: torch.Tensor, context: StepContext, batch: DeviceBatch, lanes: DeviceLanes
    ) -> tuple[torch.Tensor, ...]:
        """Queue the passes of all layers over a step's rows, and store their KV.

        Args:
            hidden: [T, D], the model's.
            ids: int64 [T], the tokens.
            context: of the model's pass.

        Returns:
            Hidden states [T, D] of the model and of all layers but the last: what `keep` takes.
        """
        states = [hidden]
        kept, most = self._kept(lanes), lanes.tokens.shape[1]
        for number in range(self.layers):
            given = self._passes.kernels.shift_states(
                states[-1], kept[:, number], batch.lanes, batch.starts, batch.first_rows, most
            )
            states.append(self._run(number, ids, given, context))
        return tuple(states[: self.layers])

    def draft(
        self,
        depth: int,
        batch: DeviceBatch,
        lanes: DeviceLanes,
        context: StepContext,
        ids: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queue the pass of the draft at `depth` of D sequences, over the rows of `draft_rows`.

        Args:
            batch: their rows, as decodes: `depth` + 1 of each sequence while there is a layer for each depth, then 1.
            context, ids: of the pass.
            before: what the pass of the depth before returned; None at depth 0.

        Returns:
            [rows, D], of all rows; the last row of each sequence is the state that the next token is guessed from.
        """
        number = min(depth, self.layers - 1)
        each = self.rows_of(depth)
        count = batch.tokens // each
        width = int(self._kept(lanes).shape[2])
        # padding reads any lane
        sequences = batch.lanes[each - 1 :: each].clamp(min=0).long()
        if before is None:
            given = self._kept(lanes)[:, 0].index_select(0, sequences)
        elif depth < self.layers:
            outer = self._kept(lanes)[:, depth].index_select(0, sequences)
            given = torch.cat((outer[:, None], before.view(count, -1, width)), dim=1).view(-1, width)
        else:
            given = before.view(count, -1, width)[:, -1].contiguous()
        return self._run(number, ids, given, context)

    def rows_of(self, depth: int) -> int:
        """How many rows of each sequence the pass of this depth has."""
        return depth + 1 if depth < self.layers else 1

    def keep(
        self, states: tuple[torch.Tensor, ...], batch: DeviceBatch, num_runs: int, lanes: DeviceLanes, pool: KVPool
    ) -> None:
        """Queue what stays of a step: of each sequence, and of each block that the step reached, the states of the last
        position that stands.

        Args:
            states: of `over_step`.
            batch: the step; only its lanes, starts and first rows are read.
            num_runs: of the first rows, the rows before their lane's length stand; all others stand.
        """
        layout = self._passes.layout
        for depth, each in enumerate(states):
            # a graph's states have its padding, too
            self._passes.kernels.keep_states(
                each[: batch.tokens], depth, lanes.lengths, num_runs, batch.lanes, batch.starts, batch.first_rows,
                lanes.tables, self._kept(lanes), pool.keys[self._carry], shares=layout.shares,
                first_share=layout.first_share, block_tokens=pool.block_tokens,
            )  # fmt: skip

    def enter(
        self, rows: torch.Tensor, blocks: torch.Tensor, lanes: DeviceLanes, pool: KVPool, group: Collectives | None
    ) -> None:
        """Queue what sequences that start on cached blocks go on from.

        Args:
            rows, blocks: int64 [n], their lanes, and the blocks of their last cached tokens.
            group: whose ranks hold the shares of a block; all of them make the same calls.
        """
        layout = self._passes.layout
        kept = self._kept(lanes)
        held = pool.keys[self._carry].index_select(0, blocks)
        if group is not None and layout.held_shares < layout.shares:
            whole = held.new_zeros((*held.shape[:2], layout.shares, *held.shape[3:]))
            if layout.writes:
                # one rank adds each share, the others zeros
                whole[:, :, layout.first_share : layout.first_share + layout.held_shares] = held
            held = group.all_reduce(whole, "what blocks carry")
        cells = held.flatten(1)[:, : self.layers * kept.shape[2]]
        kept.index_copy_(0, rows, cells.reshape(len(rows), *kept.shape[1:]))

    def _run(self, number: int, ids: torch.Tensor, given: torch.Tensor, context: StepContext) -> torch.Tensor:
        with self._passes.inference():
            return self._head.run(
                self._passes.model,
                number,
                ids,
                context.positions,
                given,
                past_key_values=context.latents if self._specs[number].latent_rank else None,
                fd_ctx=context,
            ).contiguous()

    @staticmethod
    def _kept(lanes: DeviceLanes) -> torch.Tensor:
        assert lanes.states is not None
        return lanes.states
