"""Work that blocks a loop takes its share of the loop's time, and no more."""

from __future__ import annotations

import asyncio
import time

import pytest
from fdasync_transformers.sampling.paced import Paced

WORK_S = 0.01


def work() -> float:
    time.sleep(WORK_S)
    return time.perf_counter()


async def test_what_comes_at_once_is_spread_behind_the_burst() -> None:
    paced = Paced(share=0.1, burst_s=3 * WORK_S)
    began = time.perf_counter()
    ends = sorted(await asyncio.gather(*[paced.run(work) for _ in range(6)]))
    # without a burst the fourth would begin behind 30 times the work
    assert ends[3] - began < 25 * WORK_S
    assert ends[5] - began > 19 * WORK_S


async def test_what_fails_counts_and_what_is_left_does_not() -> None:
    paced = Paced(share=0.05, burst_s=0.0)

    def failing() -> None:
        work()
        raise KeyError("no")

    with pytest.raises(KeyError):
        await paced.run(failing)
    began = time.perf_counter()
    left = asyncio.ensure_future(paced.run(work))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await paced.run(work)
    assert 19 * WORK_S < time.perf_counter() - began < 38 * WORK_S
