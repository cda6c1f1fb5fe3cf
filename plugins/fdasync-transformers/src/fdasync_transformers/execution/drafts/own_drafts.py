"""Drafts of the model's own layers (MTP) behind each step of a device: what stays of the step, and the drafting passes.

Once a step is sampled, `keep` leaves the hidden states of what stands, and a pass for each draft follows: the layers
over the sampled token (then over the draft before), logits, and a sample with the noise of the draft's position. All of
it is queued behind the step, from lengths that the device alone knows. Of a group, rank 0 samples the drafts and tells
them. Knows lanes and passes; knows no futures. Called as parts are (`parts/step_part.py`), for a model with such
layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync.errors import InvariantBroken
from fdasync_transformers.execution.drafts.draft_graphs import DraftGraphs
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart, of_prefix
from fdasync_transformers.execution.step_shape import DeviceBatch, device_batch
from fdasync_transformers.sampling.sampler import SamplePlan, compute_samples, plan_samples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.events.actions import RunStep
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.execution.parts.step_part import Arrays, StepWork, Tensors
    from fdasync_transformers.execution.step import StepModel

# of the arrays that `enter` takes
_ENTERED = ("entered", "entered_blocks")
_FLOATS = "floats"
# prefix of the arrays of the drafts' samples
_SAMPLER = "sampler."


class OwnDrafts(StepPart[SamplePlan | None]):
    """See the module.

    Args:
        model: with MTP layers.
        bound: its `speculation` says how many tokens are drafted behind each sampled one; 0: none, and the layers' KV
            is kept all the same.
        memory: of graphs.
    """

    name = "own"

    def __init__(self, model: StepModel, bound: Bound, lanes: DeviceLanes, memory: Any) -> None:
        if model.mtp is None:
            raise InvariantBroken("drafts of a model without layers that draft")
        self._model = model
        self._mtp = model.mtp
        self._kernels = model.kernels
        self._bound = bound
        self._lanes = lanes
        self._most = bound.speculation
        self._memory = memory
        self._group = bound.collectives
        self._leads = bound.collectives is None or not bound.collectives.rank
        self._graphs: DraftGraphs | None = None

    def capture(self, sizes: tuple[int, ...]) -> None:
        if self._most:
            graphs = DraftGraphs(self._pass, sizes, self._most, self._lanes, self._memory)
            if wrong := graphs.differing(self._pass):
                raise RuntimeError(f"the graph of {wrong} drafting sequences does not answer as its operations do")
            self._graphs = graphs

    def warm(self) -> None:
        tables, pool = self._lanes, self._bound.pool
        states = tables.states
        assert states is not None
        padding = torch.full((1,), -1, dtype=torch.int32, device=states.device)
        zeros = torch.zeros(2, dtype=torch.int64, device=states.device)
        batch = DeviceBatch(1, 1, padding, zeros[:1], torch.arange(2, dtype=torch.int32, device=states.device))
        rows = states.new_zeros((1, states.shape[2]))
        self._mtp.keep((rows,) * self._mtp.layers, batch, 1, tables, pool)
        self._kernels.draft_room(padding, zeros[:1], tables.lengths, tables.drafted, 0, tables.tokens.shape[1])
        floats = torch.zeros((1, 4), dtype=torch.float64, device=states.device)
        self._kernels.draft_noise(padding, floats[:, :1].contiguous(), zeros[:1], tables.lengths, 0, floats)
        # as ranks are told tokens, and as they are sampled
        for tokens in (padding, zeros[:1]):
            self._kernels.take_drafts(padding, tables.lengths, tables.drafted, 0, tokens, tables.tokens)

    def plan(self, work: StepWork) -> PartWork[SamplePlan | None]:
        arrays, plan = self._arrays(work.step, work.drafted), self._plan_samples(work.drafted)
        if plan is not None:
            arrays.update({_SAMPLER + name: array for name, array in plan.arrays.items()})
        return PartWork(self, plan, arrays)

    def before(self, work: StepWork, own: PartWork[SamplePlan | None]) -> None:
        """Queue what sequences that start on cached blocks go on from."""
        if _ENTERED[0] in own.sent:
            rows, blocks = (own.sent[name] for name in _ENTERED)
            self._mtp.enter(rows, blocks, self._lanes, self._bound.pool, self._group)

    def after(self, work: StepWork, own: PartWork[SamplePlan | None]) -> Tensors:
        """Queue what stays of the step, whose lengths are known now, and the drafts behind it."""
        if work.passed is not None:
            batch, num_runs = device_batch(work.batch, work.sent, work.way), work.batch.num_decodes
            states, pool = work.passed.states, self._bound.pool
            self._mtp.keep(states, batch, 0 if work.placed is None else num_runs, self._lanes, pool)
            if work.drafted is not None:
                self._draft(work.drafted.own_drafts, own.sent, own.plan, of_prefix(own.sent, _SAMPLER))
        return {}

    def _arrays(self, step: RunStep, drafted: StepRows | None) -> Arrays:
        """What the device needs of sequences that start on cached blocks, and for the rows of drafts; may be empty."""
        table = self._bound.table
        arrays: Arrays = {}
        cached = [start for start in step.starts if start.num_cached]
        if cached:
            size = table.block_tokens
            arrays[_ENTERED[0]] = np.array([table.lane_of(start.key) for start in cached], np.int64)
            blocks = [start.blocks[(start.num_cached - 1) // size] for start in cached]
            arrays[_ENTERED[1]] = np.array(blocks, np.int64)
        if drafted is not None and len(drafted.drafting):
            runs = drafted.runs[drafted.drafting]
            arrays["lanes"], arrays["rooms"] = runs[:, 0].astype(np.int32), runs[:, 4].copy()
            if drafted.noise is not None:
                arrays["first"], arrays["noise"] = runs[:, 9].copy(), drafted.noise[drafted.drafting]
        return arrays

    def _plan_samples(self, drafted: StepRows | None) -> SamplePlan | None:
        """How drafts are sampled, as their sequences are; None: there are none, or this rank samples none."""
        if drafted is None or not len(drafted.drafting) or not self._leads:
            return None
        # in host memory
        lanes = drafted.runs[drafted.drafting, 0]
        # drafts are no answers: no request asks for their log-probs
        specs = [
            msgspec.structs.replace(spec, raw=False, processed=False, top=0)
            for lane in lanes.tolist()
            if (spec := self._bound.table.samplers[lane]) is not None
        ]
        return plan_samples(specs, np.zeros(len(specs), np.int64), lanes, undrawn=len(specs))

    def _draft(self, most: int, sent: Mapping[str, torch.Tensor], plan: SamplePlan | None, numbers: Tensors) -> None:
        """Queue the drafts behind the tokens of a step; nothing where `sent` has no sequence that drafts.

        Args:
            most: drafts of each sequence (`StepRows.own_drafts`).
            sent: of `plan`, on the device.
            plan: of the samples; None on ranks that do not sample.
            numbers: the plan's arrays, on the device; written.
        """
        if "lanes" not in sent:
            return
        lanes, tables = sent["lanes"], self._lanes
        self._kernels.draft_room(lanes, sent["rooms"], tables.lengths, tables.drafted, most, tables.tokens.shape[1])
        states = None
        for depth in range(most):
            replayed = None if self._graphs is None else self._graphs.replay(depth, lanes)
            states, logits = self._pass(depth, lanes, states) if replayed is None else replayed
            tokens = None
            if plan is not None and logits is not None:
                if _FLOATS in numbers and "noise" in sent:
                    self._kernels.draft_noise(
                        lanes, sent["noise"], sent["first"], tables.lengths, depth, numbers[_FLOATS]
                    )
                tokens = compute_samples(self._bound.trim(logits), plan, numbers, tables.tokens)["tokens"]
            if self._group is not None:
                message = torch.zeros(len(lanes), dtype=torch.int32, device=lanes.device)
                if tokens is not None:
                    message.copy_(tokens)
                tokens = self._group.share(message, "drafts")[0]
            if tokens is not None:
                tokens = tokens.contiguous()
                self._kernels.take_drafts(lanes, tables.lengths, tables.drafted, depth, tokens, tables.tokens)

    def _pass(
        self, depth: int, lanes: torch.Tensor, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States of all rows of the pass of this depth, and logits [D, V]; none on ranks that do not sample."""
        each = self._mtp.rows_of(depth)
        row_lanes, starts = self._kernels.draft_rows(lanes, self._lanes.lengths, self._lanes.drafted, depth, each)
        count = len(row_lanes)
        first_rows = torch.arange(count + 1, dtype=torch.int32, device=lanes.device)
        rows = DeviceBatch(count, count, row_lanes, starts, first_rows)
        states, lasts = self._model.draft(depth, rows, self._lanes, self._bound.pool, before)
        return states, self._model.head.logits_of(lasts) if self._leads else None
