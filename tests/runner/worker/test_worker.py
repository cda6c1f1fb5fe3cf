"""A runner in a process of its own: the same answers, and every way for that process to end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import (
    BadInput,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvariantBroken,
    PluginError,
    RunnerError,
    UnsupportedModel,
    WorkerDied,
    WorkerStuck,
)
from fdasync.events.actions import RunStep
from fdasync.events.catalog import EngineDied
from fdasync.runner.base import RunnerLimits
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.leaks import children
from fdasync.testing.harness.processes import stop_process
from tests.support import skips
from tests.support.plugins import install_runners

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(1, 11))
LONG = SamplingParams(max_tokens=200, temperature=0.0)
# steps that take real time: requests are in the middle when something happens
SLOW = {"step_s": 0.005}


def config_of(runner=None, **values):
    return synthetic_config(runner, process="worker", **values)


@pytest.mark.ci
@pytest.mark.both_loops
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_worker_answers_as_an_inline_runner_does(depth):
    async def play(process):
        config = synthetic_config({"num_blocks": 24, "max_context_tokens": 96}, process=process, pipeline_depth=depth)
        params = SamplingParams(max_tokens=25, seed=5, n=2)
        async with Engine(config) as engine:
            prompts = [[token % 9 for token in range(number, number + 4 + number)] for number in range(12)]
            results = await asyncio.gather(*[engine.complete(prompt, params) for prompt in prompts])
            for prompt, result in zip(prompts, results, strict=True):
                for sample in result.samples:
                    check_sample(sample, prompt, params, oracle_of(config))
            check_idle(engine)
        return [sample.token_ids for result in results for sample in result.samples]

    assert await play("worker") == await play("inline")


@pytest.mark.ci
async def test_without_capture_no_arena_is_shared():
    async with Engine(config_of({"num_moe_layers": 0, "values_spec": False, "pass_stamp": False})) as engine:
        result = await engine.complete(PROMPT, LONG)
        check_sample(result.samples[0], PROMPT, LONG, oracle_of(engine.config))


async def _watch_it_fail(engine: Engine, strike, cause: type[Exception], stands=lambda: False) -> list[EngineFailed]:
    """Strike in the middle of two streams and two completes; everyone must be told. Time is skipped where it stands."""
    errors = []

    async def read(ready: asyncio.Event) -> None:
        async with engine.generate(PROMPT, LONG) as stream:
            async for _ in stream:
                ready.set()

    async def stream(ready: asyncio.Event) -> None:
        with pytest.raises(EngineFailed) as caught:
            await read(ready)
        errors.append(caught.value)

    async def complete() -> None:
        with pytest.raises(EngineFailed) as caught:
            await engine.complete(PROMPT, LONG)
        errors.append(caught.value)

    ready = [asyncio.Event(), asyncio.Event()]
    # time may be skipped
    async with asyncio.timeout(1e9), asyncio.TaskGroup() as group:
        for event in ready:
            group.create_task(stream(event))
            group.create_task(complete())
        for event in ready:
            await event.wait()
        strike()
        await skips.go_on(lambda: engine._failure is not None, stands)
    for error in errors:
        assert isinstance(error.cause, cause)
        for sample in error.partial.samples:
            assert sample.finish_reason == "failed"
            assert sample.token_ids
            check_sample(sample, PROMPT, LONG, oracle_of(engine.config))
    return errors


@pytest.mark.ci
@pytest.mark.both_loops
async def test_a_killed_worker_fails_everyone_with_what_there_is():
    async with Engine(config_of(SLOW)) as engine:
        [pid] = children()
        errors = await _watch_it_fail(engine, lambda: os.kill(pid, signal.SIGKILL), WorkerDied)
        assert len(errors) == 4
        assert {(error.cause.pid, error.cause.exit_status) for error in errors} == {(pid, -signal.SIGKILL)}
        with pytest.raises(EngineFailed):
            await engine.complete(PROMPT, LONG)
    assert engine.state == "failed"
    assert children() == []


@pytest.mark.ci
@pytest.mark.skips
async def test_a_stopped_worker_is_stuck_at_the_step_deadline_and_is_killed():
    async with Engine(config_of(SLOW, step_deadline_s=skips.LIMIT_S, request_deadline_s=1e9)) as engine:
        [pid] = children()
        errors = await _watch_it_fail(engine, lambda: stop_process(pid), WorkerStuck, skips.blocked_steps(engine))
        assert errors[0].cause.pid == pid
        assert errors[0].cause.deadline_s == skips.LIMIT_S
    assert children() == []


@pytest.mark.ci
async def test_a_worker_that_dies_idle_fails_the_engine_before_anybody_asks():
    engine = Engine(config_of())
    with pytest.raises(EngineFailed) as caught:  # noqa: PT012
        async with engine:
            [pid] = children()
            events = engine.bus.subscribe()
            os.kill(pid, signal.SIGKILL)
            # the engine ends its taps when it has ended; nothing is asked of it
            async with asyncio.timeout(300):
                [died] = [event async for event in events]
            assert isinstance(died, EngineDied)
            assert f"process {pid} ended by signal 9" in died.problem
            assert engine.state == "failed"
    assert isinstance(caught.value.cause, WorkerDied)
    assert (caught.value.cause.pid, caught.value.cause.exit_status) == (pid, -signal.SIGKILL)
    assert children() == []


@pytest.mark.ci
async def test_a_step_that_fails_in_the_worker_is_told_in_its_words():
    engine = Engine(config_of({"fail_step": 3}))
    async with engine:
        with pytest.raises(EngineFailed) as caught:
            await engine.complete(PROMPT, LONG)
        cause = caught.value.cause
        assert isinstance(cause, RunnerError)
        assert (cause.step_id, cause.problem) == (3, "the step was told to fail")
    assert children() == []


@pytest.mark.ci
async def test_a_hung_step_does_not_outlive_aclose():
    engine = Engine(config_of({"hang_step": 2}, close_deadline_s=0.3))
    await engine.start()
    task = asyncio.create_task(engine.complete(PROMPT, LONG))
    async with asyncio.timeout(300):
        while engine.stats().scheduler.steps < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.aclose()
    assert (await task).finish_reason == "abort"
    assert children() == []


# -- starts that fail -----------------------------------------------------------------------------------


async def test_an_unknown_key_of_the_runners_config_is_named():
    with pytest.raises(ConfigError) as caught:
        await Engine(config_of({"bogus_key": 1})).start()
    assert caught.value.field == "runner_config.bogus_key"
    assert children() == []


async def test_a_value_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError) as caught:
        await Engine(config_of({"num_experts": "many"})).start()
    assert caught.value.field == "runner_config.num_experts"


async def test_bad_input_to_the_runner_crosses_the_wire():
    with pytest.raises(BadInput) as caught:
        await Engine(config_of({"num_moe_layers": 0}, routing=True)).start()
    assert caught.value.field == "routing"
    assert caught.value.hint


def test_a_runner_that_is_not_installed_is_refused_at_once():
    with pytest.raises(PluginError) as caught:
        Engine({"runner": "nobody"})
    assert caught.value.name == "nobody"
    assert "synthetic" in str(caught.value)


_PLUGIN = """
    import asyncio, gc, os, time
    import msgspec
    from fdasync.errors import CheckpointError, RunnerError, UnsupportedModel
    from fdasync.runner.base import Runner, StepOutput
    from fdasync.runner.synthetic import SyntheticRunner

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        way: str

    class Bad(Runner):
        config_type = Config

        async def open(self):
            way = self.config.way
            if way == "checkpoint":
                raise CheckpointError("/models/x", "shard 2 is missing")
            if way == "model":
                raise UnsupportedModel("x", "no such attention")
            if way == "other":
                raise ZeroDivisionError("by zero")
            if way == "exit":
                os._exit(3)
            await asyncio.Event().wait()

        async def bind(self, num_blocks, arena, host=None, snapshots=None): ...
        def launch(self, step): ...
        def copy(self, copy): ...
        async def aclose(self): ...

    class Busy(SyntheticRunner):
        # blocks its loop in the first step, as a forward pass does, and says on stdout when it does
        def launch(self, step):
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(600)

    class Disorderly(SyntheticRunner):
        # answers for another step than the one that it was given
        def launch(self, step):
            done = asyncio.get_running_loop().create_future()
            done.set_result(StepOutput(step.step_id + 1, (1,)))
            return done

    class Collected(SyntheticRunner):
        # tells how much the garbage collector leaves alone
        def launch(self, step):
            raise RunnerError(f"{gc.get_freeze_count()}")
"""


@pytest.fixture
def bad_plugin(tmp_path: Path, monkeypatch):
    """A distribution with a runner that fails as it is told, and one that cannot be imported."""
    (tmp_path / "fdasync_broken.py").write_text("import there_is_no_such_module\n")
    runners = {
        "bad": "fdasync_bad:Bad", "broken": "fdasync_broken:Bad", "nothing": "fdasync_bad:Config",
        "busy": "fdasync_bad:Busy", "disorderly": "fdasync_bad:Disorderly",
        "collected": "fdasync_bad:Collected",
    }  # fmt: skip
    install_runners(tmp_path, monkeypatch, _PLUGIN, runners)


def _bad_engine(way: str, runner: str = "bad", **values) -> Engine:
    return Engine({"runner": runner, "runner_config": {"way": way}, **values})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "error", "fields"),
    [
        ("checkpoint", CheckpointError, {"path": "/models/x", "problem": "shard 2 is missing"}),
        ("model", UnsupportedModel, {"model": "x", "reason": "no such attention"}),
        ("other", RunnerError, {"problem": "ZeroDivisionError: by zero"}),
        ("exit", WorkerDied, {"exit_status": 3}),
    ],
)
async def test_a_runner_that_cannot_load_says_why(bad_plugin, way, error, fields):
    engine = _bad_engine(way)
    with pytest.raises(error) as caught:
        await engine.start()
    assert type(caught.value) is error
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert engine.state == "failed"
    assert children() == []
    await engine.aclose()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("runner", ["broken", "nothing"])
async def test_a_plugin_that_is_broken_is_named_with_its_distribution(bad_plugin, runner):
    with pytest.raises(PluginError) as caught:
        await _bad_engine("x", runner).start()
    assert (caught.value.name, caught.value.distribution) == (runner, "fdasync-bad")
    assert children() == []


async def test_a_runner_that_loads_for_ever_is_killed_at_the_deadline(bad_plugin):
    with pytest.raises(DeadlineExceeded, match="starting the runner"):
        await _bad_engine("hang", start_deadline_s=1.0).start()
    assert children() == []


async def test_a_cancelled_start_kills_the_worker(bad_plugin):
    engine = _bad_engine("hang")
    starting = asyncio.create_task(engine.start())
    while not children():  # noqa: ASYNC110
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == []


# -- steps that go wrong --------------------------------------------------------------------------------


@pytest.mark.ci
async def test_a_runner_that_answers_for_another_step_fails_the_engine(bad_plugin):
    async with Engine(msgspec.structs.replace(config_of(), runner="disorderly")) as engine:
        async with asyncio.timeout(300):
            with pytest.raises(EngineFailed) as caught:
                await engine.complete(PROMPT, SamplingParams(max_tokens=1))
        assert isinstance(caught.value.cause, InvariantBroken)
        assert "completed step 1 before step 0" in str(caught.value.cause)
    assert children() == []


@pytest.mark.ci
async def test_what_a_worker_made_before_its_first_step_is_nothing_for_its_garbage_collector(bad_plugin):
    async with Engine(msgspec.structs.replace(config_of(), runner="collected")) as engine:
        with pytest.raises(EngineFailed) as caught:
            await engine.complete(PROMPT, SamplingParams(max_tokens=1))
        # all modules and what they hold
        assert int(str(caught.value.cause).split()[-1]) > 10_000


async def test_closing_a_busy_worker_kills_it_without_asking(bad_plugin, capfd):
    limits = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=8, block_tokens=16)
    runner = WorkerRunner("busy", {"num_moe_layers": 0}, limits, close_deadline_s=600.0)
    await runner.open()
    await runner.bind(8, None)
    step = runner.launch(RunStep(1))
    # it is asked for nothing: it would not read the question
    async with asyncio.timeout(300):
        await runner.aclose()
    with pytest.raises(RunnerError, match="closed"):
        await step
    assert children() == []


# -- the engine's own end -------------------------------------------------------------------------------

_ENGINE = """
    import asyncio, sys
    from fdasync import Engine
    from fdasync.testing import synthetic_config
    from fdasync.testing.harness.leaks import children

    async def main():
        async with Engine(synthetic_config(process="worker")):
            print(*children(), flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


_BUSY_ENGINE = """
    import asyncio, msgspec
    from fdasync import Engine, SamplingParams
    from fdasync.testing import synthetic_config

    async def main():
        async with Engine(msgspec.structs.replace(synthetic_config(process="worker"), runner="busy")) as engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=4))

    asyncio.run(main())
"""


def _end_of_worker(script: str, how: signal.Signals) -> None:
    """Run an engine that prints its worker's pid, end it, and wait for its worker to end."""
    engine = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    with engine:
        try:
            worker = int(engine.stdout.readline())
            pidfd = os.pidfd_open(worker)
        finally:
            engine.send_signal(how)
            engine.wait(300)
    ended, _, _ = select.select([pidfd], [], [], 300.0)
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert ended, "the worker lives on"


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_dies_with_its_engine(how):
    _end_of_worker(_ENGINE, how)


@pytest.mark.ci
def test_a_worker_that_does_not_read_its_socket_dies_with_its_engine(bad_plugin):
    _end_of_worker(_BUSY_ENGINE, signal.SIGKILL)
