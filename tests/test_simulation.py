"""Whole engines in virtual time under random work and faults, and the tools that this stands on."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
import uvloop

from fdasync.errors import RunnerError, WorkerDied
from fdasync.runner.base import RunnerLimits
from fdasync.runner.oracle import SyntheticConfig
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import (
    Deadlock,
    EdgeRunner,
    LeakFound,
    Livelock,
    PassModel,
    SimulationFailed,
    StepFault,
    Workload,
    no_leaks,
    on_bench,
    run_sim,
    simulate,
)
from fdasync.testing.pytest_plugin import all_strike
from fdasync.testing.runners.bench import noisy
from fdasync.testing.sim import engine as simulation_module
from fdasync.testing.sim.transport import SimFabric, SimFaults

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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


#: on which what real timers, threads and files do is in play
_LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}
_REAL_SEEDS = 1000
# of them, for several processes to share
_PARTS = 4


def in_real_time(name: str, seeds: Iterable[int], folder: Path, config: pytest.Config) -> tuple[Counter[str], ...]:
    """Play these seeds, or the one that was asked for; every other one on a file store."""
    only = config.getoption("--sim-seed")
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in seeds if only is None else (only,):
        report = simulate(seed, loop=_LOOPS[name], folder=folder / str(seed) if seed % 2 else None)
        outcomes.update(report.outcomes)
        numbers = msgspec.structs.asdict(report)
        totals.update({name: value for name, value in numbers.items() if name != "outcomes"})
    return outcomes, totals


@pytest.mark.parametrize("name", _LOOPS)
def test_simulation_in_real_time(name: str, tmp_path: Path, request: pytest.FixtureRequest):
    first = 0 if name == "uvloop" else 20
    outcomes, totals = in_real_time(name, range(first, first + 20), tmp_path, request.config)
    if request.config.getoption("--sim-seed") is None:
        assert not {"stop", "length", "abort", "deadline", "closed"} - outcomes.keys()
        work = ("rows", "hit_tokens", "preemptions", "evictions", "written_blocks", "swapped_in_blocks")
        assert all(totals[name] for name in work), totals


@pytest.mark.slow
@pytest.mark.parametrize("name", _LOOPS)
@pytest.mark.parametrize("part", range(_PARTS))
def test_simulation_in_real_time_of_many_seeds(part: int, name: str, tmp_path: Path, request: pytest.FixtureRequest):
    _, totals = in_real_time(name, range(part, _REAL_SEEDS, _PARTS), tmp_path, request.config)
    assert totals["rows"]


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


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_real_sockets_work_between_tasks_of_the_loop(kind, tmp_path):
    rounds, think_s, data = 50, 30.0, bytes(range(256)) * 2000

    async def serve(reader, writer):
        # more than a socket's buffers hold, both ways
        while question := await reader.read(1 << 16):
            await asyncio.sleep(0.001)
            writer.write(question)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def ask(connect, number):
        reader, writer = await connect()
        for _ in range(rounds):
            # a deadline in virtual time never comes before bytes that are under way
            async with asyncio.timeout(0.01):
                writer.write(b"%d" % number)
                assert await reader.read(100) == b"%d" % number
            await asyncio.sleep(think_s)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.close()
        await writer.wait_closed()

    async def main():
        loop = asyncio.get_running_loop()
        if kind == "tcp":
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            connect = functools.partial(asyncio.open_connection, "127.0.0.1", port)
        else:
            path = str(tmp_path / "s")
            server = await asyncio.start_unix_server(serve, path)
            connect = functools.partial(asyncio.open_unix_connection, path)
        async with server, asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(ask(connect, number))
        return loop.time()

    assert rounds * think_s <= run_sim(main()) < rounds * (think_s + 0.01) + 1.0


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
        edge = _edge(fault=StepFault(kind, 2), max_delay_s=1.0)
        async with on_bench(edge) as on:
            first = on.launch_prefill(on.start(0, on.prompt(5), [0]))
            await first
            before = on.launch()
            with pytest.raises(AssertionError, match=f"fault '{kind}' of step 2 never struck: the last was step 1"):
                edge.assert_struck()
            struck = on.launch()
            edge.assert_struck()
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


def test_a_test_whose_fault_never_struck_fails_at_its_end():
    def play(steps):
        async def main(watch):
            edge = watch(_edge(fault=StepFault("fail", 1)))
            async with on_bench(edge) as on:
                await asyncio.wait([on.launch() for _ in range(steps)])

        with all_strike() as watch:
            run_sim(main(watch))

    play(2)
    with pytest.raises(AssertionError, match="fault 'fail' of step 1 never struck: the last was step 0"):
        play(1)


def test_a_test_that_fails_for_another_reason_is_told_that_reason():
    with pytest.raises(ZeroDivisionError), all_strike() as watch:
        _ = len(watch(_edge()).launched) / 0


def test_faults_of_transports_are_counted_too():
    fabric = SimFabric(Random(1), SimFaults(corrupt=1.0, stall=1e-9))
    with pytest.raises(AssertionError, match=r"never struck: corrupt, stall \(struck: corrupt 0, fail 0, stall 0\)"):
        fabric.assert_struck()
    assert fabric.strikes("corrupt")
    fabric.assert_struck("corrupt")
    with pytest.raises(AssertionError, match="never struck: stall"):
        fabric.assert_struck()
    fabric.faults = SimFaults()
    with pytest.raises(AssertionError, match="no fault of transports was planned"):
        fabric.assert_struck()


def test_what_died_by_hand_was_struck_by_no_fault():
    async def main():
        for fault in (None, StepFault("die", 7)):
            edge = _edge(fault=fault)
            async with on_bench(edge):
                edge.die()
                assert edge.broken
                with pytest.raises(AssertionError, match="there was no step" if fault else "no fault was injected"):
                    edge.assert_struck()

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


def test_edges_keep_the_order_where_timers_do_not():
    async def main():
        loop = asyncio.get_running_loop()
        edge = _edge(max_delay_s=1.0)
        async with on_bench(edge) as on:
            await on.launch_prefill(on.start(0, on.prompt(3), [0]))
            # the later a timer is due, the sooner it fires; a real loop exchanges those that are close
            at = loop.call_at
            loop.call_at = lambda when, *call: at(100.0 - when, *call)
            ended = []
            pending = [on.launch() for _ in range(5)]
            for future in pending:
                future.add_done_callback(lambda done: ended.append(done.result().step_id))
            await asyncio.wait(pending)
            del loop.call_at
            return ended

    assert run_sim(main()) == [1, 2, 3, 4, 5]


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
    from random import Random
    import pytest
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.oracle import SyntheticConfig
    from fdasync.runner.synthetic import SyntheticRunner
    from fdasync.testing import EdgeRunner, StepFault, on_bench

    LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=16)

    def test_virtual_time(run_sim):
        run_sim(asyncio.sleep(1e5))

    def test_leaks_fail(no_leaks):
        os.pipe()

    def test_blocking_fails(no_blocking):
        async def main():
            time.sleep(0.001)
        asyncio.run(main())

    def test_never_struck_fails(run_sim, must_strike):
        async def main():
            runner = EdgeRunner(SyntheticRunner(SyntheticConfig(), LIMITS), Random(1), fault=StepFault("die", 9))
            async with on_bench(must_strike(runner)) as on:
                await on.launch()
        run_sim(main())

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
    # a leak, and a fault that never struck, are found when the fixture ends, after the test itself has passed
    assert {name: ends.get(name) for name in ("test_virtual_time", "test_nothing_is_imposed", "test_seeds")} == {
        "test_virtual_time": "PASSED",
        "test_nothing_is_imposed": "PASSED",
        "test_seeds": "PASSED",
    }, done.stdout
    assert ends["test_blocking_fails"] == "FAILED"
    for name in ("test_leaks_fail", "test_never_struck_fails"):
        assert any(line.startswith("ERROR") and name in line for line in lines), name
    assert "the fault 'die' of step 9 never struck: the last was step 0" in done.stdout
    assert "simulated 3 seeds, 0 to 2" in lines
    assert "three of them" in lines
