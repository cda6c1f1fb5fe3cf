"""Work that blocks a loop takes its share of the loop's time, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_transformers.sampling import paced
from fdasync_transformers.sampling.paced import Paced

if TYPE_CHECKING:
    from collections.abc import Callable

WORK_S = 0.01


class Work:
    """Takes `WORK_S` each time by the clock with which it is paced; the loop's own time is virtual.

    Attributes:
        begun_at: loop time of each call.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.begun_at: list[float] = []

    def __call__(self) -> int:
        self.begun_at.append(asyncio.get_running_loop().time())
        self.spent_s += WORK_S
        return len(self.begun_at)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr(paced, "time", SimpleNamespace(perf_counter=lambda: work.spent_s))
    return work


def test_what_comes_at_once_is_spread_behind_the_burst(run_sim: Callable[[Any], Any], work: Work) -> None:
    async def play() -> None:
        began = asyncio.get_running_loop().time()
        own = Paced(share=0.1, burst_s=3 * WORK_S)
        assert await asyncio.gather(*[own.run(work) for _ in range(6)]) == [1, 2, 3, 4, 5, 6]
        # the burst, a fourth once it is used up; each of the others waits for ten times the work
        waited = [at - began for at in work.begun_at]
        assert waited == pytest.approx([0, 0, 0, 0, 10 * WORK_S, 20 * WORK_S], abs=1e-6)

    run_sim(play())


def test_what_fails_counts_and_what_is_left_does_not(run_sim: Callable[[Any], Any], work: Work) -> None:
    async def play() -> None:
        own = Paced(share=0.05, burst_s=0.0)

        def failing() -> None:
            work()
            raise KeyError("no")

        with pytest.raises(KeyError):
            await own.run(failing)
        left = asyncio.ensure_future(own.run(work))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        await own.run(work)
        first, second = work.begun_at
        assert second - first == pytest.approx(20 * WORK_S, abs=1e-6)

    run_sim(play())
