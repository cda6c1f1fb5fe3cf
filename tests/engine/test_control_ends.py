"""How control calls end where they meet: what a review of the states of `engine/weights` found."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync import SamplingParams
from fdasync.errors import EngineClosed, WeightsDiffer
from fdasync.testing import run_sim
from tests.support.weights_play.calls import CALLS
from tests.support.weights_play.meetings import PARAMS, PROMPT, Meeting, check
from tests.support.weights_play.meetings_engine import EngineStage
from tests.support.weights_play.play import FIRST, NUMBERS, write_folders

if TYPE_CHECKING:
    from pathlib import Path

    from blockbuster import BlockBuster


@pytest.fixture
def stage(tmp_path: Path) -> EngineStage:
    write_folders(tmp_path)
    return EngineStage(tmp_path)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("first", "then"), [("begin", "update"), ("begin", "label"), ("join", "update")])
def test_a_call_that_its_caller_gave_up_is_over_when_it_returns(first: str, then: str, busy: bool, tmp_path: Path):
    """The next call met it, or an update in parts stayed open and nothing went on."""
    write_folders(tmp_path)
    for turn in range(24):
        meeting = Meeting(((first, then),), (0,), cancels=((0, 0, turn),), busy=busy)
        outcome = check(meeting, lambda: EngineStage(tmp_path))
        if outcome.made[0].result == "cancelled":
            assert outcome.made[1].result == "", turn
            assert outcome.state.doing == "running"


def test_weights_that_a_wake_found_changed_and_an_update_brings_back_end_no_request(
    stage: EngineStage, blocking_calls: BlockBuster
):
    folder, other, aside = stage.root / f"w-{FIRST}", stage.root / f"w-{NUMBERS[1]}", stage.root / "aside"

    def move(one: Path, to: Path) -> None:
        blocking_calls.deactivate()
        one.rename(to)
        blocking_calls.activate()

    async def work() -> None:
        async with stage.opened() as engine:
            request = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.05)
            await engine.sleep(2)
            move(folder, aside)
            move(other, folder)
            with pytest.raises(WeightsDiffer):
                await engine.wake()
            move(folder, other)
            move(aside, folder)
            await engine.update_weights(0, str(folder), "abort")
            (sample,) = (await request).samples
            assert (sample.finish_reason, len(sample.token_ids)) == ("length", PARAMS.max_tokens)

    run_sim(work())


def test_a_pause_that_waits_outlasts_a_pause_that_was_taken_back(stage: EngineStage):
    """It was in the part of its wait that has a limit, which failed the engine."""

    async def work() -> None:
        async with stage.opened() as engine:
            pausing = engine.weights.pausing
            pausing._config = msgspec.structs.replace(engine.config, step_deadline_s=0.2)
            request = asyncio.create_task(engine.complete(PROMPT, SamplingParams(max_tokens=120, seed=1)))
            await asyncio.sleep(0.025)
            first = asyncio.create_task(engine.pause("in_place"))
            waits = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0)
            first.cancel()
            await waits
            assert request.done()
            assert (await request).samples[0].finish_reason == "length"
            await engine.resume()

    run_sim(work())


@pytest.mark.parametrize(
    ("name", "verb", "resumes"),
    [("join", "join_group", True), ("update", "load_folder", False), ("sleep", "release_memory", False)],
)
def test_a_close_lets_writes_to_the_store_end_unless_weights_or_memory_may_be_gone(
    name: str, verb: str, resumes: bool, stage: EngineStage, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> None:
        engine, asked, hangs = stage._engine, [], asyncio.Event()
        await engine.start()
        runtime = engine._runtime
        wind_down = runtime.wind_down

        async def noted(*, resume: bool = True) -> None:
            asked.append(resume)
            await wind_down(resume=resume)

        async def hang(*_: object, **__: object) -> None:
            hangs.set()
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(runtime, "wind_down", noted)
        monkeypatch.setattr(runtime.runner, verb, hang)
        call = asyncio.ensure_future(CALLS[name].run(engine, stage))
        await hangs.wait()
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await call
        assert asked == [resumes]

    run_sim(work())
