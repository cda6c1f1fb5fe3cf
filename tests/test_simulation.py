"""Whole engines in virtual time under random work and faults, and the tools that this stands on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync.errors import RunnerError, WorkerDied
from fdasync.runner.base import RunnerLimits
from fdasync.runner.oracle import SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import (
    Deadlock,
    EdgeRunner,
    Fault,
    LeakFound,
    Livelock,
    PassModel,
    SimulationFailed,
    Workload,
    no_leaks,
    on_bench,
    run_sim,
    simulate,
)
from fdasync.testing import simulation as simulation_module
from fdasync.testing.bench import noisy

if TYPE_CHECKING:
    from fdasync.testing.pytest_plugin import SimSeeds


def test_simulation(sim_seeds: SimSeeds):
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in sim_seeds:
        report = simulate(seed)
        outcomes.update(report.outcomes)
        numbers = msgspec.structs.asdict(report)
        totals.update({name: value for name, value in numbers.items() if name != "outcomes"})
    said = {name: round(value) for name, value in totals.items()}
    sim_seeds.notes += [
        ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())),
        ", ".join(f"{count} {name}" for name, count in said.items()),
    ]
    if sim_seeds.tried >= 40:
        # a simulation that no longer gets into trouble proves nothing
        missing = {"stop", "length", "abort", "deadline", "failed", "cancelled", "closed"} - outcomes.keys()
        assert not missing
        assert all(totals[name] for name in ("preemptions", "evictions", "hit_tokens", "dropped_tokens", "rows"))


def test_a_seed_gives_the_same_simulation_again():
    assert Workload.draw(3) == Workload.draw(3)
    assert simulate(3) == simulate(3)
    assert simulate(3) != simulate(4)


def test_a_failing_simulation_names_its_seed(monkeypatch):
    def wrong(*args, **kwargs):
        raise AssertionError("something is wrong")

    monkeypatch.setattr(simulation_module, "check_sample", wrong)
    with pytest.raises(SimulationFailed, match=r"seed 5: AssertionError: something is wrong\n.*--sim-seed 5") as caught:
        simulate(5)
    assert caught.value.seed == 5


# -- virtual time -------------------------------------------------------------------------------------


def test_time_is_virtual_and_timers_keep_their_order():
    async def main():
        order = []
        loop = asyncio.get_running_loop()
        for number in range(5):
            loop.call_at(2.0, order.append, number)
        loop.call_at(1.0, order.append, "first")
        await asyncio.sleep(1e6)
        assert 1e6 <= loop.time() < 1e6 + 1e-3
        return order

    assert run_sim(main()) == ["first", 0, 1, 2, 3, 4]


def test_a_timeout_does_not_beat_code_that_needs_no_time():
    async def busy():
        for _ in range(1000):
            await asyncio.sleep(0)
        return "done"

    async def main():
        # due at once for an impatient clock, yet nothing here takes any time
        async with asyncio.timeout(1e-6):
            return await busy()

    assert run_sim(main()) == "done"


def test_all_that_follows_from_a_timer_comes_before_the_next_of_the_same_time():
    async def main():
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        loop.call_at(1.0, answered.set_result, "answered")
        async with asyncio.timeout_at(1.0):
            return await answered

    assert run_sim(main()) == "answered"


def test_a_timer_never_fires_before_its_time():
    async def main():
        loop = asyncio.get_running_loop()
        random = Random(0)
        early = []
        for _ in range(2000):
            when = loop.time() + random.random() * random.choice((1e-9, 1e-3, 1.0, 1e5))
            loop.call_at(when, lambda when=when: early.append(when) if loop.time() < when - 1e-12 else None)
        await asyncio.sleep(2e5)
        return early

    assert run_sim(main()) == []


def test_a_deadlock_is_an_error_that_names_who_waits():
    async def main():
        async def stuck():
            await asyncio.get_running_loop().create_future()

        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(Deadlock, match=r"the-stuck-one in .*stuck"):
        run_sim(main())


def test_polling_without_a_timer_is_an_error():
    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run_sim(main())


def test_a_task_left_behind_is_an_error():
    left = []

    async def main():
        left.append(asyncio.create_task(asyncio.sleep(5), name="forgotten"))

    with pytest.raises(RuntimeError, match="forgotten"):
        run_sim(main())


def test_the_fixture_runs_in_virtual_time(run_sim):
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_sim(main()) >= 3600


# -- leaks --------------------------------------------------------------------------------------------


def test_leaks_of_fds_segments_and_tasks_are_found():
    import mmap
    import os

    fd = -1
    with pytest.raises(LeakFound, match="memfd:left"), no_leaks():
        fd = os.memfd_create("left")
    os.ftruncate(fd, 4096)
    segments = []
    with pytest.raises(LeakFound, match=r"shared segment .*memfd:left"), no_leaks():
        segments.append(mmap.mmap(fd, 4096))
    segments[0].close()
    os.close(fd)

    async def main():
        with no_leaks():
            task = asyncio.create_task(asyncio.sleep(1), name="left-task")
        await task

    with pytest.raises(LeakFound, match="task left-task"):
        run_sim(main())


def test_leaks_of_threads_and_children_are_found():
    import threading

    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(30,), name="left-thread")
    with pytest.raises(LeakFound, match="thread left-thread"), no_leaks():
        thread.start()
    go.set()
    thread.join()
    started = []
    with pytest.raises(LeakFound, match="child process"), no_leaks():
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    started[0].communicate(b"\n")


def test_a_blocking_call_on_a_loop_is_an_error():
    import time

    from blockbuster import BlockingError

    async def main():
        time.sleep(0.001)  # noqa: ASYNC251

    with pytest.raises(BlockingError):
        run_sim(main())


# -- edges --------------------------------------------------------------------------------------------


def _edge(**options) -> EdgeRunner:
    config = SyntheticConfig(step_s=0.01)
    limits = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=16)
    return EdgeRunner(SyntheticRunner(config, limits), Random(1), **options)


@pytest.mark.parametrize("kind", ["fail", "hang", "die"])
def test_a_fault_strikes_at_its_step(kind):
    async def main():
        edge = _edge(fault=Fault(kind, 2), max_delay_s=1.0)
        async with on_bench(edge) as on:
            first = on.launch_prefill(on.start(0, on.prompt(5), [0]))
            await first
            before = on.launch()
            struck = on.launch()
            await asyncio.wait([before, struck], timeout=100.0)
            if kind == "hang":
                assert before.exception() is None
                assert not struck.done()
            elif kind == "fail":
                assert before.exception() is None
                assert isinstance(struck.exception(), RunnerError)
            else:
                assert isinstance(before.exception(), WorkerDied), "it was in flight"
                assert isinstance(struck.exception(), WorkerDied)
            after = on.launch()
            await asyncio.wait([after], timeout=100.0)
            assert after.done() == (kind != "hang")
            _ = kind == "hang" or after.exception()

    run_sim(main())


def test_edges_delay_and_keep_the_order():
    async def main():
        loop = asyncio.get_running_loop()
        edge = _edge(max_delay_s=1.0)
        async with on_bench(edge) as on:
            await on.launch_prefill(on.start(0, on.prompt(3), [0]))
            ended = []
            pending = [on.launch() for _ in range(10)]
            for future in pending:
                future.add_done_callback(lambda done: ended.append((done.result().step_id, loop.time())))
            await asyncio.wait(pending)
            return ended

    ended = run_sim(main())
    assert [step_id for step_id, _ in ended] == list(range(1, 11))
    assert ended[-1][1] > 0.2, "nothing was delayed"
    assert run_sim(main()) == ended, "the seed does not give the same delays"


def test_pass_model_takes_the_first_pass_and_the_stamp_of_hits():
    async def main():
        model = PassModel(16)
        async with on_bench(_edge(on_launch=model.launched)) as on:
            prompt = on.prompt(20)
            await on.answer(0, prompt, 2, [0, 1], sampler=noisy(1))
            # steps 0 and 1 computed it, 2 let it leave; step 3 reads block 0 and computes the rest
            await on.launch_prefill(on.start(1, prompt, [0, 5], cached=16, sampler=noisy(2)))
            # preempted and resumed: what it has stays
            await on.leave(1)
            await on.launch_prefill(on.start(1, [*prompt, 1], [7, 8], sampler=noisy(2)))
            return model

    model = run_sim(main())
    stamps = model.stamps
    assert model.read == {(1, 0): set(), (2, 0): {(1, 0)}}
    assert stamps[1, 0] == [0] * 20 + [1]
    assert stamps[2, 0] == [0] * 16 + [3] * 4 + [5]


# -- the plugin in somebody else's project ------------------------------------------------------------

_THEIRS = """
    import asyncio, os, time
    import pytest

    def test_virtual_time(run_sim):
        run_sim(asyncio.sleep(1e5))

    def test_leaks_fail(no_leaks):
        os.pipe()

    def test_blocking_fails(no_blocking):
        async def main():
            time.sleep(0.001)
        asyncio.run(main())

    def test_nothing_is_imposed():
        async def main():
            time.sleep(0.001)
        asyncio.run(main())
        os.pipe()

    def test_seeds(sim_seeds):
        assert list(sim_seeds) == [0, 1, 2]
        sim_seeds.notes.append("three of them")
"""


def test_the_plugin_serves_other_projects(tmp_path):
    (tmp_path / "test_theirs.py").write_text(textwrap.dedent(_THEIRS))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--seeds", "3", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    lines = done.stdout.splitlines()
    ends = {line.split("::")[1].split()[0]: line.split()[0] for line in lines if "::" in line and line[0] in "PFE"}
    # a leak is found when the fixture ends, after the test itself has passed
    assert {name: ends.get(name) for name in ("test_virtual_time", "test_nothing_is_imposed", "test_seeds")} == {
        "test_virtual_time": "PASSED",
        "test_nothing_is_imposed": "PASSED",
        "test_seeds": "PASSED",
    }, done.stdout
    assert ends["test_blocking_fails"] == "FAILED"
    assert any(line.startswith("ERROR") and "test_leaks_fail" in line for line in lines)
    assert "simulated 3 seeds, 0 to 2" in lines
    assert "three of them" in lines
