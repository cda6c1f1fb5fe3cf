"""A step of `device_executor.py` whose logits are queued, and the names of its arrays and results.

Knows no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from fdasync.gpu.completion import Hold
    from fdasync.runner.input_batch import Batch
    from fdasync_transformers.execution.device_step import Passed, Way
    from fdasync_transformers.execution.drafts.device_drafts import Placed
    from fdasync_transformers.execution.drafts.step_rows import StepRows
    from fdasync_transformers.execution.lane_matchers import StepMatchers
    from fdasync_transformers.sampling.sampler import SamplePlan
    from fdasync_transformers.sampling.scoring import ScorePlan

T = TypeVar("T")

#: prefixes of names among the arrays of a step: of the sampler, of scores of prompts, of rows, of runs, of the model's
#: own drafts, and of the sampler for these drafts
SAMPLER, SCORES, AUX, RUNS, OWN, OWN_SAMPLER = "sampler.", "scores.", "aux.", "runs.", "own.", "own_sampler."
#: name of what the ranks of a group tell each other
RANKS = "ranks"


class BegunStep(NamedTuple):
    """See the module.

    Attributes:
        batch, way: the step, and how its tokens attend.
        plan: of its samples; None: it samples nothing.
        scores: of prompts; None: there are none.
        matchers: of its samples under a grammar; None: there are none.
        sent: its arrays, on the device.
        passed: logits of the rows that are sampled, and what the model's own layers go on from; None: nothing is
            forwarded.
        results: tensors that go to the host.
        holds: buffers that the queued work uses.
        drafted: the step where it may have drafts: `batch` is its rows.
        placed: of `drafted`, where it samples.
        own_plan: of the samples of the model's own drafts; None: this process samples none.
    """

    batch: Batch
    way: Way
    plan: SamplePlan | None
    scores: ScorePlan | None
    matchers: StepMatchers | None
    sent: dict[str, torch.Tensor]
    passed: Passed | None
    results: dict[str, torch.Tensor]
    holds: list[Hold]
    drafted: StepRows | None = None
    placed: Placed | None = None
    own_plan: SamplePlan | None = None


def own(arrays: Mapping[str, T], owner: str) -> dict[str, T]:
    """The arrays of one prefix (`SAMPLER`, `AUX`), by their names without it."""
    return {name.removeprefix(owner): array for name, array in arrays.items() if name.startswith(owner)}
