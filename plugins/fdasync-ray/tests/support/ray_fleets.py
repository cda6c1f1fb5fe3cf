"""What the tests of fleets share: weights, a steady load, and looks at processes that are no children of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from fdasync import SamplingParams

WHOLE_S = 30.0
# for what no figure is told of
SOON_S = 300.0
PARAMS = SamplingParams(max_tokens=24, seed=7)
PROMPT = list(range(2, 60))


def weights(number: int) -> list[Any]:
    return [("weights", "uint64", (1,), np.array([number], np.uint64))]


class Load:
    """Requests one after the other on so many tracks, until it ends; each must end whole.

    Attributes:
        done: how many have ended.
        longest_s: how long the slowest took.
    """

    def __init__(self, router: Any, tracks: int) -> None:
        self._router = router
        self._going = True
        self.done = 0
        self.longest_s = 0.0
        self._tasks = [asyncio.create_task(self._track(number)) for number in range(tracks)]

    async def _track(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while self._going:
            began = loop.time()
            result = await self._router.complete([number + 2, *PROMPT], PARAMS, deadline_s=60)
            assert result.samples[0].finish_reason == "length", result
            assert len(result.samples[0].token_ids) == PARAMS.max_tokens
            self.done += 1
            self.longest_s = max(self.longest_s, loop.time() - began)

    async def end(self) -> int:
        self._going = False
        await asyncio.gather(*self._tasks)
        return self.done


async def until_used(router: Any, address: str) -> None:
    async with asyncio.timeout(SOON_S):
        while not any(  # noqa: ASYNC110 - no event announces it
            one.address == address and one.is_up and not one.problem for one in router.stats().instances
        ):
            await asyncio.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def environment_of(pid: int) -> dict[str, str]:
    pairs = [one.partition("=") for one in Path(f"/proc/{pid}/environ").read_text().split("\0")]
    return {name: value for name, _, value in pairs}


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(SOON_S):
        while any(runs(pid) for pid in pids):  # noqa: ASYNC110 - they are no children of this process
            await asyncio.sleep(0.05)
