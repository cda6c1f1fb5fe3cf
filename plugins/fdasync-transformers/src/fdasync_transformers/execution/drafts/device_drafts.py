"""Drafts of the steps of a device: sends what their rows need, and queues the kernels around sampling.

The lengths of sequences that decode live in `DeviceLanes.lengths`: each step's kernels read them and move them, so a
step may be launched before the host knows where the one before it ended. Knows no model. Made by `device_executor.py`
where steps may have drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from fdasync_kernels.drafts import RUN_COLUMNS, accept_drafts, place_drafts

from fdasync_transformers.execution.drafts.step_rows import RowPlanner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync.events.actions import RunStep
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.drafts.step_rows import Settled, StepRows
    from fdasync_transformers.execution.executor import Bound


class Placed(NamedTuple):
    """Where the decodes of a queued step are, int32 [n] on the device.

    Attributes:
        starts: position of the first row of each.
        used: how many of its rows are no padding.
    """

    starts: torch.Tensor
    used: torch.Tensor


class DeviceDrafts:
    """See the module.

    Args:
        bound: its table was made for runs of `speculation` + 1 tokens.
        own: whether the model's own layers draft, too (`own_drafts.py`).
    """

    def __init__(self, bound: Bound, lanes: DeviceLanes, *, own: bool = False) -> None:
        self._planner = RowPlanner(bound.table, bound.speculation, bound.pipeline_depth, own=own)
        self._own = own
        self._lanes = lanes
        self._vocab_size = bound.vocab_size
        self._most_rows = bound.speculation + 1

    def plan(self, step: RunStep) -> StepRows:
        """As `InputBatch.plan`. Raises InvariantBroken, also for drafts that do not fit the step or the limits."""
        return self._planner.plan(step)

    @staticmethod
    def arrays(step: StepRows) -> dict[str, NDArray[np.generic]]:
        """What the device needs of a step, for `place` and `accept`."""
        arrays: dict[str, NDArray[np.generic]] = {"runs": step.runs, "paths": step.paths}
        if step.noise is not None:
            arrays["noise"] = step.noise
        return arrays

    def place(
        self, step: StepRows, own: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor], floats: Any
    ) -> Placed:
        """Queue the rows of the decodes: which tokens of each lane are forwarded, and the noise of their samples.

        Args:
            own: `arrays`, on the device.
            sent: of `batch_arrays`; the first rows are written anew.
            floats: of the samples' jobs, float64 [J, 4], or None; written.
        """
        decodes, rows = len(step.lanes), step.rows.num_decodes
        counts = sent.get("counts")
        noise = None if floats is None or "noise" not in own else own["noise"][:decodes]
        return Placed(
            *place_drafts(
                own["runs"][:decodes],
                own["paths"],
                self._lanes.lengths,
                self._lanes.tokens,
                self._vocab_size,
                self._most_rows,
                sent["lanes"][:rows],
                sent["starts"][:rows],
                None if counts is None else counts[:rows],
                noise,
                None if noise is None else floats,
                self._lanes.drafted if self._own else None,
            )
        )

    def accept(self, placed: Placed, own: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Queue what follows from the samples (int64 [R]): known tokens and lengths. Returns what `settle` takes."""
        lanes = self._lanes
        counts = accept_drafts(
            own["runs"], tokens, placed.starts, placed.used, lanes.lengths, lanes.tokens, self._most_rows
        )
        return {"starts": placed.starts, "counts": counts, "used": placed.used}

    def settle(self, step: StepRows, fetched: Mapping[str, Any]) -> Settled:
        """The step has ended. `fetched`: of `accept`, on the host; empty where nothing was sampled."""
        if not fetched:
            # no decode had room for a row
            nothing = np.zeros(len(step.runs), np.int64)
            return self._planner.settle(step, step.known, nothing, nothing[: len(step.lanes)])
        return self._planner.settle(step, fetched["starts"], fetched["counts"], fetched["used"])

    def warm(self) -> None:
        """Queue the kernels once, so that no step waits while they are compiled."""
        device = self._lanes.tokens.device
        runs = torch.full((1, len(RUN_COLUMNS)), -1, dtype=torch.int64, device=device)
        paths = torch.zeros(1, dtype=torch.int32, device=device)
        rows = torch.zeros(1, dtype=torch.int32, device=device)
        drafted = self._lanes.drafted if self._own else None
        floats = torch.zeros((1, 4), dtype=torch.float64, device=device)
        for counts in (None, rows):
            for noise in (None, floats):
                placed = Placed(
                    *place_drafts(
                        runs, paths, self._lanes.lengths, self._lanes.tokens, self._vocab_size, self._most_rows,
                        rows, rows.long(), counts, noise, noise, drafted,
                    )
                )  # fmt: skip
        self.accept(placed, {"runs": runs}, rows.long())
