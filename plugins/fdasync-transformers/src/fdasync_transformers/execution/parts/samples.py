"""Samples of a step: planned on the host, computed on the device, read once they are on the host.

Called as parts are (`step_part.py`), in the process that samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from fdasync_transformers.sampling.repeat import repeat_rows
from fdasync_transformers.sampling.sampler import SamplePlan, compute_samples, plan_samples, read_samples
from fdasync_transformers.sampling.token_logprobs import token_logprobs
from fdasync_transformers.sampling.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import StepOutput
    from fdasync_transformers.execution.bound import Bound
    from fdasync_transformers.execution.device_lanes import DeviceLanes
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors


class Samples(StepPart[SamplePlan]):
    """Args:
    dtype: of the model's logits.
    """

    name = "sampler"

    def __init__(self, bound: Bound, lanes: DeviceLanes, dtype: torch.dtype) -> None:
        self._bound = bound
        self._lanes = lanes
        self._dtype = dtype

    def plan(self, work: StepWork) -> PartWork[SamplePlan] | None:
        if not len(work.rows):
            return None
        batch, drafted = work.batch, work.drafted
        lanes, positions = batch.lanes[batch.sampled], batch.positions[work.rows] + 1
        if drafted is None:
            plan = self._plan(lanes, positions)
            return PartWork(self, plan, plan.arrays)
        # rows of one sequence are planned once; the device draws the noise of positions that the host does not know
        widths = drafted.widths[drafted.widths > 0]
        times = np.concatenate([widths, np.ones(len(work.rows) - batch.num_decodes, np.int64)])
        first = np.cumsum(times) - times
        plan = repeat_rows(self._plan(lanes[first], positions[first], undrawn=len(widths)), times)
        return PartWork(self, plan, plan.arrays)

    def _plan(self, lanes: Any, positions: Any, undrawn: int = 0) -> SamplePlan:
        # in host memory
        samplers = self._bound.table.samplers
        specs = [spec for lane in lanes.tolist() if (spec := samplers[lane]) is not None]
        return plan_samples(specs, positions, lanes, undrawn=undrawn)

    def before(self, work: StepWork, own: PartWork[SamplePlan]) -> None:
        work.noise = own.sent.get("floats")

    def after(self, work: StepWork, own: PartWork[SamplePlan]) -> Tensors:
        if work.passed is None:
            return {}
        plain = self._bound.trim(work.passed.logits)
        logits, rows = work.processed or (plain, None)
        sampled = compute_samples(logits, own.plan, own.sent | work.masks, self._lanes.tokens)
        work.tokens = sampled["tokens"]
        if rows is not None and "raw" in sampled:
            # of the model's own logits
            raw = token_logprobs(plain.index_select(0, rows), work.tokens.index_select(0, rows))
            sampled["raw"] = sampled["raw"].index_copy(0, rows, raw)
        return sampled

    def read(
        self, work: StepWork, own: PartWork[SamplePlan], fetched: Mapping[str, Any], output: StepOutput
    ) -> StepOutput:
        chosen = None if work.settled is None else work.settled.samples
        # in host memory, as all that was fetched
        work.sampled = fetched["tokens"].tolist()
        samples = read_samples(own.plan, fetched, chosen).step_output(output.step_id)
        return msgspec.structs.replace(
            output, tokens=samples.tokens, raw=samples.raw, processed=samples.processed, top=samples.top
        )

    def warm(self) -> None:
        if self._lanes.tokens.is_cuda:
            logits = torch.empty((0, self._bound.vocab_size), dtype=self._dtype)
            warm_up(self._bound.vocab_size, self._bound.trim(logits).dtype, self._lanes.tokens)
