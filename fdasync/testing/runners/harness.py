"""What the suites for runners share: how a test runs, what a suite is given, when two answers are the same.

Knows nothing but the contract. Used by `runners/suite.py`, `copies.py`, `open_blocks.py` and
`runners/weights.py`.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fdasync.errors import RunnerError
from fdasync.runner.base import Runner, RunnerLimits
from fdasync.testing.harness.verdicts import check, equal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fdasync.testing.runners.bench import Answer

_LIMIT_S = 60.0
# of a row in a message
_MOST_VALUES = 32

S = TypeVar("S", bound="RunnerSuite")


def on_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An async test method as a plain one, on a new loop of `new_loop`."""

    @functools.wraps(test)
    def run(self: S) -> None:
        self.run(test(self))

    # pytest must see a plain function, whatever plugin looks for coroutines
    del run.__wrapped__
    return run


class RunnerSuite:
    """What a suite is given.

    Attributes:
        limits: given to `make`; needs room for 4 sequences, 12 blocks and steps of 4 blocks.
        logprobs: the runner computes log-probs.
        overlaps: the runner takes a step while one is in flight.
        loads: the runner takes new weights; then `make_of`, `write_folder` and `tensors_of` are defined.
        batch_safe: others in a batch change no token of a sequence: surely so in exact arithmetic, as good as always in
            float32, not in bfloat16. If not, sequences that another instance began go on without others beside them.
        logprob_error: how far log-probs of the same thing may be apart: 0.0 unless a runner's arithmetic depends on
            the batch.
    """

    limits = RunnerLimits(max_running=4, max_step_tokens=256, block_tokens=16, num_blocks=24, pipeline_depth=2)
    logprobs = True
    overlaps = True
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
        """Break a folder of `write_folder` in a way that a runner must see before it changes anything."""
        for path in folder.iterdir():
            path.unlink()

    def tensors_of(self, weights: int) -> Sequence[tuple[str, str, tuple[int, ...], Any]]:
        """All tensors of set 0 or 1: name, dtype, shape, contiguous buffer."""
        raise NotImplementedError

    def new_loop(self) -> asyncio.AbstractEventLoop:
        import uvloop

        return uvloop.new_event_loop()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test on a new loop, within a minute."""
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(asyncio.wait_for(test, _LIMIT_S))

    def assert_same(self, one: Answer, other: Answer) -> None:
        """Two computations of the same thing. Exact, unless a runner's arithmetic depends on the batch."""
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
    """Raise AssertionError unless this ended with a RunnerError that says what is wrong."""
    error = ended.exception()
    check(isinstance(error, RunnerError), f"{what} raises RunnerError", error or ended.result())
    check(getattr(error, "problem", ""), f"{what} raises RunnerError with a problem in words", error)
