"""A step is made of parts: the turns and the order in which they are asked. The executor knows none by its name."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from device_path import DEVICE
from fdasync_transformers.execution import executor
from fdasync_transformers.execution.gpu_services import GpuServices
from fdasync_transformers.execution.parts.make import make_parts
from fdasync_transformers.execution.parts.step_part import PartWork, StepPart
from step_driver import Driver
from written import write_tiny_checkpoint

from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk

if TYPE_CHECKING:
    from fdasync_transformers.execution.parts.step_part import StepWork, Tensors

SRC = Path(executor.__file__).parent
# modules of parts
PARTS = {"aux_rows", "chosen", "clean_blocks", "grammars", "ranks", "samples", "scores", "tables"}
PARTS |= {"device_drafts", "own_drafts", "device_states", "host_states"}


class Doubled(StepPart[int]):
    """A part of one's own: sends the number of each step's tokens, doubles it behind the pass, and reads it.

    Attributes:
        log: the turns in which it was asked.
        found: what came back.
    """

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self.found: list[list[int]] = []
        self.log = log
        self.fails = fails

    def turn(self, name: str) -> None:
        self.log.append(f"{self.name} {name}")
        if name == self.fails:
            raise ValueError(f"{self.name} fails")

    def plan(self, work: StepWork) -> PartWork[int] | None:
        self.turn("plan")
        count = {"count": np.array([work.total], np.int64)}
        return PartWork(self, work.step.step_id, count) if work.total else None

    def before(self, work: StepWork, own: PartWork[int]) -> None:
        self.turn("before")
        assert work.passed is None

    def passed(self, work: StepWork, own: PartWork[int]) -> Tensors:
        self.turn("passed")
        assert work.passed is not None
        assert work.tokens is None
        return {"doubled": 2 * own.sent["count"]}

    def after(self, work: StepWork, own: PartWork[int]) -> Tensors:
        self.turn("after")
        # parts in front of it have sampled
        return {"tokens": work.tokens.clone()} if work.tokens is not None else {}

    def read(self, work: StepWork, own: PartWork[int], fetched: Any, output: Any) -> Any:
        self.turn("read")
        assert own.plan == work.step.step_id
        # in host memory
        self.found.append([*fetched["doubled"].tolist(), *fetched["tokens"].tolist()])
        return output

    def warm(self) -> None:
        self.turn("warm")


async def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Doubled) -> Driver:
    def with_own(*args: Any) -> Any:
        rows, parts = make_parts(*args)
        return rows, (*parts, *own)

    write_tiny_checkpoint(folder, "qwen3_moe")
    monkeypatch.setattr(executor, "make_parts", with_own)
    return await Driver.open(folder, config={"self_check": False, "cuda_graphs": False, **DEVICE})


async def test_a_part_of_one_s_own_is_asked_in_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    one, two = Doubled("one", log), Doubled("two", log)
    driver = await opened(tmp_path, monkeypatch, one, two)
    assert log == ["one warm", "two warm"]
    log.clear()
    asked = driver.sequence([5, 6, 7, 8, 9], 2)
    await driver.run([asked])
    turns = ["plan", "before", "passed", "after"]
    step = [f"{part} {turn}" for turn in turns for part in ("one", "two")]
    # results are read in the reverse order; the last step has no token, and so no turn but the first
    step += ["two read", "one read"]
    assert log == [*step, *step, "one plan", "two plan"]
    # nothing of theirs is mixed up, nor with parts of the runner
    assert one.found == two.found == [[10, asked.tokens[0]], [2, asked.tokens[1]]]
    await driver.close()


@pytest.mark.parametrize("turn", ["plan", "before", "passed", "after", "read"])
async def test_a_part_that_fails_fails_its_step_and_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    driver = await opened(tmp_path, monkeypatch, Doubled("one", [], fails=turn), Doubled("two", []))
    executor: Any = driver.runner.bound.executor
    with pytest.raises(RunnerError, match="ValueError: one fails"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    await driver.close()
    services = executor._services
    assert (services.events.outstanding, services.pinned.outstanding, services.port.lost) == ({}, {}, 0)


async def test_results_live_until_the_device_is_done_with_them_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on the other stream may still read them."""
    driver = await opened(tmp_path, monkeypatch, Doubled("one", []))
    executor: Any = driver.runner.bound.executor
    fetched: list[weakref.ref[Any]] = []
    fetch, completion = GpuServices.fetch, executor._services.port.completion

    def keeps(services: GpuServices, results: Any, holds: Any) -> Any:
        fetched[:] = [weakref.ref(value) for value in results.values()]
        return fetch(services, results, holds)

    def completes(*args: Any, on_done: Any, **kwargs: Any) -> Any:
        def done() -> Any:
            gc.collect()
            lived.append(all(one() is not None for one in fetched))
            return on_done()

        return completion(*args, on_done=done, **kwargs)

    lived: list[bool] = []
    monkeypatch.setattr(GpuServices, "fetch", keeps)
    monkeypatch.setattr(executor._services.port, "completion", completes)
    one = driver.sequence([5, 6, 7], 1)
    output = await driver.step(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
    assert len(output.tokens) == 1
    assert lived == [True]
    assert len(fetched) >= 4
    gc.collect()
    assert [one() for one in fetched if one() is not None] == []
    await driver.close()


class Late(Doubled):
    """Not ready until `ready` is set."""

    ready = False

    def is_ready(self, plan: int) -> bool:
        return self.ready


async def test_a_part_that_is_not_ready_waits_for_the_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    late = Late("late", log)
    driver = await opened(tmp_path, monkeypatch, late)
    executor: Any = driver.runner.bound.executor
    late.ready = True
    one = driver.sequence([5, 6, 7], 3)
    first = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
    one.tokens.append(0)
    late.ready = False
    log.clear()
    streams = executor._services.streams
    for name in ("record", "wait"):
        monkeypatch.setattr(streams, name, lambda stream, _event, name=name: log.append(f"{name} {stream}"))
    second = driver.launch(appends=driver.append(one))
    # its pass is queued, and nothing behind it; buffers of that come back behind both streams
    assert log == ["late plan", "late before", "late passed", "record compute", "wait results", "record results"]
    late.ready = True
    await first
    await second
    assert [turn for turn in log[6:] if turn.startswith("late")] == ["late read", "late after", "late read"]
    await driver.close()


async def test_a_part_of_the_first_step_has_none_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = await opened(tmp_path, monkeypatch, Late("late", []))
    with pytest.raises(RunnerError, match="a part of the first step is not ready"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    await driver.close()


async def test_a_part_may_want_a_pass_by_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wants(Doubled):
        def plan(self, work: StepWork) -> PartWork[int] | None:
            work.by_operations = self.wants
            ways.append(work)
            return None

        wants = False

    ways: list[StepWork] = []
    part = Wants("wants", [])
    driver = await opened(tmp_path, monkeypatch, part)
    executor: Any = driver.runner.bound.executor
    with executor._services.streams.on("compute"):
        executor.capture_mixed((16,), 4)
    for part.wants in (False, True):
        await driver.run([driver.sequence([5, 6, 7], 1)])
    assert [work.way for work in ways if work.total] == ["tiles", "both"]
    await driver.close()


def test_the_executor_knows_no_part_by_its_name() -> None:
    for name in ("executor", "passes", "flights", "copies"):
        nodes = list(ast.walk(ast.parse((SRC / f"{name}.py").read_text())))
        words = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        words |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {word.rpartition(".")[2] for word in words} & PARTS, name


async def test_parts_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names keep their arrays apart."""
    driver = await opened(tmp_path, monkeypatch)
    names = [part.name for part in driver.runner.bound.executor._parts]
    assert len(set(names)) == len(names)
    await driver.close()
