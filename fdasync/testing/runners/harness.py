"""What the suites for runners share: the hooks of an adopter, and the comparison of two answers.

Knows the contract (`runner/base.py`) only. Used by the other files of this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fdasync.errors import RunnerError
from fdasync.runner.base import Runner, RunnerLimits
from fdasync.testing.harness.bounded import LoopHooks
from fdasync.testing.harness.verdicts import check, equal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fdasync.request import Grammar
    from fdasync.testing.runners.bench import Answer

# at most so many values of a row stand in a message
_MOST_VALUES = 32


class RunnerSuite(LoopHooks):
    """What an adopter of `RunnerTests` or `RunTests` says about its runner.

    Attributes:
        limits: given to `make`, in some tests with `numerics="fixed"`; must have room for 4 sequences, 12 blocks and
            steps of 4 blocks.
        logprobs: the runner computes log-probs.
        overlaps: the runner takes a step while one is in flight.
        grammar: a grammar that changes samples, and allows four tokens and more; None: the runner has no grammars.
        loads: the runner takes new weights; then `make_of`, `write_folder` and `tensors_of` are defined.
        batch_safe: a batch changes no token of a sequence: always so in exact arithmetic, nearly always in float32, not
            in bfloat16. False: sequences that another instance began go on alone.
        logprob_error: how far apart log-probs of the same token may be: 0.0 unless the arithmetic depends on the
            batch.
    """

    limits = RunnerLimits(max_running=4, max_step_tokens=256, block_tokens=16, num_blocks=24, pipeline_depth=2)
    logprobs = True
    overlaps = True
    grammar: Grammar | None = None
    loads = False
    batch_safe = True
    logprob_error = 0.0

    def make(self, limits: RunnerLimits) -> Runner:
        """A new runner, not opened; two of them must answer alike."""
        raise NotImplementedError

    def make_of(self, limits: RunnerLimits, weights: int) -> Runner:
        """A new runner with set 0 of the weights (that of `make`) or with set 1, which answers otherwise."""
        raise NotImplementedError

    def write_folder(self, folder: Path, weights: int) -> None:
        """Write set 0 or 1 into an empty folder, for `load_folder`."""
        raise NotImplementedError

    def break_folder(self, folder: Path) -> None:
        """Break a folder of `write_folder` so that a runner must refuse it before it changes anything."""
        for path in folder.iterdir():
            path.unlink()

    def tensors_of(self, weights: int) -> Sequence[tuple[str, str, tuple[int, ...], Any]]:
        """All tensors of set 0 or 1: name, dtype, shape, contiguous buffer."""
        raise NotImplementedError

    def assert_same(self, one: Answer, other: Answer) -> None:
        """Raise AssertionError unless two computations of a sequence agree; an adopter may allow for its arithmetic."""
        equal(other.tokens, one.tokens, "tokens of the same sequence, computed another way")
        equal(sorted(other.rows), sorted(one.rows), "names of rows of the same sequence, computed another way")
        for name, rows in one.rows.items():
            if name != "stamp":
                same_rows(other.rows[name], rows, f"rows of {name} of the same sequence, computed another way")


def same_rows(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Raise AssertionError, with the first row that differs, unless two arrays of rows are equal."""
    if np.array_equal(found, wanted):
        return
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        shapes = [f"{rows.dtype} {list(rows.shape)}" for rows in (found, wanted)]
        raise AssertionError(f"{what}: it returned {shapes[0]} instead of {shapes[1]}")
    at = next(at for at in range(len(found)) if not np.array_equal(found[at], wanted[at]))
    row, right = [rows[at].reshape(-1)[:_MOST_VALUES].tolist() for rows in (found, wanted)]
    raise AssertionError(f"{what}: row {at} of {len(found)} is {row} instead of {right}")


def is_runner_error(ended: asyncio.Future[Any], what: str) -> None:
    """Raise AssertionError unless the future ended with a RunnerError that has a problem in words."""
    error = ended.exception()
    check(isinstance(error, RunnerError), f"{what} raises RunnerError", error or ended.result())
    check(getattr(error, "problem", ""), f"{what} raises RunnerError with a problem in words", error)
