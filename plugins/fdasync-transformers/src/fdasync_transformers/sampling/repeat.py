"""A plan of samples whose rows come several times, as the rows of drafts do: planned once a sequence.

The rows of one sequence ask for the same, so all that differs between them is their noise, which the device puts in.
numpy only. Called by `execution/parts/samples.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken
from fdasync_transformers.sampling.plan import EDIT, MASK, PLAIN_FLOATS, RAW, RAW_JOB, ROW, STOP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fdasync_transformers.sampling.plan import SamplePlan


def repeat_rows(plan: SamplePlan, times: NDArray[np.integer]) -> SamplePlan:
    """The plan of the same rows, row i `times`[i] times, one behind the other: what `plan_samples` makes of them.

    Args:
        plan: its rows that come more than once take drafts (`takes_drafts`), and their noise is not drawn.
        times: [N], at least 1 each.

    Raises:
        InvariantBroken: another number of `times`, or a row cannot be repeated.
    """
    if len(times) != plan.count or (times < 1).any():
        raise InvariantBroken(f"{len(times)} rows to repeat, of {plan.count}, or one of them not even once")
    of = np.repeat(np.arange(plan.count), times)
    if len(of) == plan.count:
        return plan
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tops: NDArray[np.int64] = np.zeros(0, np.int64)
    jobs, edited = len(of), 0
    if not plan.plain:
        first = np.cumsum(times) - times
        old = plan.arrays["ints"]
        several = old[: plan.count][times > 1]
        if (several[:, [STOP, MASK]] >= 0).any():
            raise InvariantBroken("a row under a mask cannot be repeated")
        ints = old[of]
        ints[:, ROW] = np.arange(len(of))
        # slots count the rows that have one
        for column in (EDIT, STOP, MASK):
            has = ints[:, column] >= 0
            ints[has, column] = np.arange(int(has.sum()))
        edited = int((ints[:, EDIT] >= 0).sum())
        raw = ints[:, RAW].copy()
        own = (raw >= 0) & (raw < plan.count)
        ints[own, RAW] = ints[own, ROW]
        more = np.flatnonzero(raw >= plan.count)
        ints[more, RAW] = len(of) + np.arange(len(more))
        extra = np.tile(np.array(RAW_JOB, np.int64), (len(more), 1))
        extra[:, ROW] = more
        jobs += len(more)
        arrays["ints"] = np.concatenate([ints, extra])
        floats = np.tile(np.array(PLAIN_FLOATS), (len(more), 1))
        arrays["floats"] = np.concatenate([plan.arrays["floats"][of], floats])
        if "edits" in plan.arrays:
            edits = plan.arrays["edits"].copy()
            if (times[edits[:, 1]] > 1).any():
                raise InvariantBroken("a row with penalties cannot be repeated")
            edits[:, 1] = first[edits[:, 1]]
            edits[:, 0] = ints[edits[:, 1], EDIT]
            arrays["edits"], arrays["penalties"] = edits, plan.arrays["penalties"]
        for name, column in (("bias_cells", EDIT), ("stop_cells", STOP)):
            if name not in plan.arrays:
                continue
            cells = plan.arrays[name]
            each = times[cells[:, 1]]
            which = np.repeat(np.arange(len(cells)), each)
            rows = first[cells[which, 1]] + np.arange(len(which)) - np.repeat(np.cumsum(each) - each, each)
            order = np.argsort(rows, kind="stable")
            which, rows = which[order], rows[order]
            arrays[name] = np.column_stack([ints[rows, column], rows, cells[which, 2]])
            if name == "bias_cells":
                arrays["bias"] = plan.arrays["bias"][which]
        if plan.top_rows:
            chosen = np.zeros(plan.count, np.int64)
            chosen[list(plan.top_rows)] = np.arange(1, len(plan.top_rows) + 1)
            numbers = chosen[of]
            tops = np.flatnonzero(numbers)
            numbers = numbers[tops] - 1
            arrays["top_raw"] = plan.arrays["top_raw"][numbers]
            arrays["top_counts"] = plan.arrays["top_counts"][numbers]
            arrays["top_jobs"] = np.where(arrays["top_raw"] > 0, ints[tops, RAW], tops)
    return msgspec.structs.replace(
        plan, count=len(of), jobs=jobs, arrays=arrays, edited=edited, raw=plan.raw[of], processed=plan.processed[of],
        top_rows=tuple(tops.tolist()),
    )  # fmt: skip
