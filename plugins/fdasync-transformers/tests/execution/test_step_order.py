"""Steps whose sampling waits for the step before: they end in order, whatever comes behind them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from device_path import DEVICE
from fdasync_transformers import make_random_checkpoint
from step_driver import Driver

from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk
from fdasync.request import Grammar

if TYPE_CHECKING:
    from pathlib import Path


GRAMMAR = Grammar("regex", "[a-f]{2}[0-9]{4}x*").packed()


class Flights:
    """Three steps in a row, of a sequence under a grammar and a free one; the third leaves the first one out."""

    def __init__(self, driver: Driver, *, leaves: bool = True) -> None:
        self.ended: list[str] = []
        held, free = driver.sequence([5, 6, 7], 4, grammar=GRAMMAR), driver.sequence([8, 9, 10], 4)
        starts = [driver.start(held), driver.start(free)]
        chunks = [Chunk(held.key, 3, True), Chunk(free.key, 3, True)]
        steps = [driver.launch(starts=starts, chunks=chunks)]
        for number in range(2):
            left = (held.key,) if leaves and number else ()
            for one in (held, free):
                one.tokens.append(0)
            going = [free] if left else [held, free]
            steps.append(driver.launch(leaves=left, appends=[part for one in going for part in driver.append(one)]))
        self.steps = dict(zip("abc", steps, strict=True))
        for name, step in self.steps.items():
            step.add_done_callback(lambda _, name=name: self.ended.append(name))

    async def wait(self) -> list[Any]:
        async with asyncio.timeout(300):
            await asyncio.wait(self.steps.values())
            await asyncio.sleep(0)
        return [step.exception() for step in self.steps.values()]


async def opened(folder: Path) -> Driver:
    make_random_checkpoint(folder, size="tiny")
    return await Driver.open(folder, config={"self_check": False, **DEVICE}, pipeline_depth=2)


@pytest.mark.ci
async def test_a_step_that_waits_for_nothing_does_not_overtake(tmp_path: Path) -> None:
    driver = await opened(tmp_path)
    flights = Flights(driver)
    assert await flights.wait() == [None] * 3
    assert flights.ended == ["a", "b", "c"]
    await driver.close()


async def test_a_second_part_that_fails_fails_the_rest_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await opened(tmp_path)
    flights = Flights(driver, leaves=False)

    def broken(*_args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("fdasync_transformers.execution.parts.samples.compute_samples", broken)
    first, second, third = await flights.wait()
    assert first is None
    assert isinstance(second, RunnerError)
    assert "boom" in str(second)
    assert isinstance(third, RunnerError)
    assert flights.ended == ["a", "b", "c"]
    services = driver.runner.bound.executor._services  # type: ignore[union-attr]
    await driver.close()
    assert not services.events.outstanding
    assert not services.pinned.outstanding


@pytest.mark.ci
async def test_closing_while_a_step_waits_ends_every_step(tmp_path: Path) -> None:
    driver = await opened(tmp_path)
    flights = Flights(driver, leaves=False)
    await driver.close()
    errors = await flights.wait()
    assert errors[0] is None or isinstance(errors[0], RunnerError)
    assert all(isinstance(error, RunnerError) for error in errors[1:])
