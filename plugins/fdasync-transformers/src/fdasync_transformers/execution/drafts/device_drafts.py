"""Drafts of the steps of a device: lays out their rows, and queues the kernels around sampling.

The lengths of sequences that decode live in `DeviceLanes.lengths`: each step's kernels read them and move them, so a
step may be launched before the host knows where the one before it ended. Knows no model. Called as parts are
(`parts/step_part.py`), where steps may have drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fdasync_kernels.drafts import RUN_COLUMNS

from fdasync_transformers.execution.drafts.step_rows import RowPlanner, StepRows
from fdasync_transformers.execution.parts.step_part import Accepted, PartWork, Placed, RowsPart, StepWork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync_kernels.step_kernels import StepKernels

    from fdasync.events.actions import RunStep
    from fdasync.runner.base import StepOutput
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.drafts.step_rows import Settled
    from fdasync_transformers.execution.parts.step_part import Tensors


class DeviceDrafts(RowsPart[StepRows]):
    """See the module.

    Args:
        bound: its table was made for runs of `speculation` + 1 tokens.
        own: whether the model's own layers draft, too (`own_drafts.py`).
    """

    def __init__(self, bound: Bound, lanes: DeviceLanes, kernels: StepKernels, *, own: bool = False) -> None:
        self._planner = RowPlanner(bound.table, bound.speculation, bound.pipeline_depth, own=own)
        self._own = own
        self._lanes = lanes
        self._kernels = kernels
        self._vocab_size = bound.vocab_size
        self._most_rows = bound.speculation + 1

    def begin(self, step: RunStep) -> StepWork:
        drafted = self._planner.plan(step)
        return StepWork(step, drafted.rows, drafted)

    def plan(self, work: StepWork) -> PartWork[StepRows] | None:
        drafted, arrays = work.drafted, dict[str, "np.ndarray[Any, Any]"]()
        assert drafted is not None
        if len(work.rows):
            arrays.update(runs=drafted.runs, paths=drafted.paths)
            if drafted.noise is not None:
                arrays["noise"] = drafted.noise
        return PartWork(self, drafted, arrays)

    def before(self, work: StepWork, own: PartWork[StepRows]) -> None:
        """Queue the rows of the decodes: which tokens of each lane are forwarded (the first rows of `work.sent` are
        written anew), and the noise of their samples."""
        if not own.sent:
            return
        decodes, rows = len(own.plan.lanes), own.plan.rows.num_decodes
        counts = work.sent.get("counts")
        noise = None if work.noise is None or "noise" not in own.sent else own.sent["noise"][:decodes]
        work.placed = Placed(
            *self._kernels.place_drafts(
                own.sent["runs"][:decodes],
                own.sent["paths"],
                self._lanes.lengths,
                self._lanes.tokens,
                self._vocab_size,
                self._most_rows,
                work.sent["lanes"][:rows],
                work.sent["starts"][:rows],
                None if counts is None else counts[:rows],
                noise,
                None if noise is None else work.noise,
                self._lanes.drafted if self._own else None,
            )
        )

    def after(self, work: StepWork, own: PartWork[StepRows]) -> Tensors:
        if work.placed is None or work.tokens is None:
            return {}
        told = self._accept(work.placed, own.sent["runs"], work.tokens.long())
        work.accepted = Accepted(own.sent["runs"], len(own.plan.lanes), told)
        return told

    def read(
        self, work: StepWork, own: PartWork[StepRows], fetched: Mapping[str, Any], output: StepOutput
    ) -> StepOutput:
        work.settled = settled = self._settle(own.plan, fetched)
        drafts = settled.own_drafts if self._own else None
        return msgspec.structs.replace(output, counts=settled.counts, own_drafts=drafts)

    def _accept(self, placed: Placed, runs: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        """Queue what follows from the samples (int64 [R]): known tokens and lengths. Returns what `_settle` takes."""
        lanes = self._lanes
        counts = self._kernels.accept_drafts(
            runs, tokens, placed.starts, placed.used, lanes.lengths, lanes.tokens, self._most_rows
        )
        return {"starts": placed.starts, "counts": counts, "used": placed.used}

    def _settle(self, step: StepRows, fetched: Mapping[str, Any]) -> Settled:
        """The step has ended. `fetched`: of `_accept`, on the host; empty where nothing was sampled."""
        if not fetched:
            # no decode had room for a row
            nothing = np.zeros(len(step.runs), np.int64)
            return self._planner.settle(step, step.known, nothing, nothing[: len(step.lanes)])
        return self._planner.settle(step, fetched["starts"], fetched["counts"], fetched["used"])

    def warm(self) -> None:
        device = self._lanes.tokens.device
        runs = torch.full((1, len(RUN_COLUMNS)), -1, dtype=torch.int64, device=device)
        paths = torch.zeros(1, dtype=torch.int32, device=device)
        rows = torch.zeros(1, dtype=torch.int32, device=device)
        drafted = self._lanes.drafted if self._own else None
        floats = torch.zeros((1, 4), dtype=torch.float64, device=device)
        for counts in (None, rows):
            for noise in (None, floats):
                placed = Placed(
                    *self._kernels.place_drafts(
                        runs, paths, self._lanes.lengths, self._lanes.tokens, self._vocab_size, self._most_rows,
                        rows, rows.long(), counts, noise, noise, drafted,
                    )
                )  # fmt: skip
        self._accept(placed, runs, rows.long())
