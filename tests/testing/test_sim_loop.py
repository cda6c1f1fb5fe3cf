"""Virtual time: timers in order, no time for what needs none, deadlocks and polling are errors."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from fdasync.errors import BadInput, RunnerError
from fdasync.testing import (
    Deadlock,
    LateLoop,
    Livelock,
    NotSimulated,
    SimLoop,
    run_sim,
    synthetic_config,
    synthetic_engine,
)

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


def test_a_deadlock_is_an_error_that_names_the_waiting_tasks():
    async def main():
        async def stuck():
            await asyncio.get_running_loop().create_future()

        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(Deadlock, match=r"the-stuck-one in .*stuck"):
        run_sim(main())


@pytest.mark.ci
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


def met(seed):
    """When timers that are a millisecond apart fire on a late loop, in nanoseconds."""

    async def scenario():
        loop, seen = asyncio.get_running_loop(), []
        for number in range(1, 201):
            loop.call_at(number / 1000, lambda: seen.append(round(loop.time() * 1e9)))
        await asyncio.sleep(1.0)
        return seen

    return run_sim(scenario(), LateLoop(seed))


def test_a_late_loop_meets_timers_together_and_never_more_than_30_ms_late():
    seen = met(7)
    late_ns = [moment - number * 1_000_000 for number, moment in enumerate(seen, 1)]
    assert 0 <= min(late_ns) < max(late_ns) <= 30_000_000
    # several fire in one turn
    assert len(set(seen)) < len(seen)
    assert met(7) == seen != met(8)


# -- what never ends ----------------------------------------------------------------------------------


def test_a_test_that_waits_for_ever_beside_an_open_engine_ends_at_its_limit():
    async def main():
        async with synthetic_engine():
            await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"^60 s of virtual time have passed") as caught:
        run_sim(main(), limit_s=60.0)
    assert any(line.startswith("Task-") and "main (" in line for line in caught.value.waiting), caught.value.waiting


def test_the_limit_of_a_run_is_a_day_unless_it_names_another(run_sim):
    async def repeat(seen):
        while True:
            await asyncio.sleep(3600.0)
            seen.append(asyncio.get_running_loop().time())

    for limit_s, hours in ((None, 24), (7200.0, 2)):
        seen = []
        with pytest.raises(Deadlock, match=r"repeat \(.* > sleep \("):
            run_sim(repeat(seen)) if limit_s is None else run_sim(repeat(seen), limit_s=limit_s)
        assert len(seen) == hours
    with pytest.raises(BadInput, match=r"limit_s.*nan"):
        run_sim(asyncio.sleep(0), limit_s=math.nan)


# -- threads and processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [SimLoop, functools.partial(LateLoop, 1)])
def test_work_in_a_thread_takes_no_virtual_time(loop, no_leaks):
    go = threading.Event()

    def work():
        assert go.wait(600.0)
        raise LookupError("the thread's own")

    async def main():
        loop, beats = asyncio.get_running_loop(), []

        async def beat():
            while True:
                await asyncio.sleep(0.1)
                beats.append(loop.time())

        beating = asyncio.create_task(beat())
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        loop.call_soon(go.set)
        # the clock would have to move for this, and for the beats
        async with asyncio.timeout(1e-6):
            with pytest.raises(LookupError, match="the thread's own"):
                await working
        assert not beats
        assert loop.time() == 0.0
        beating.cancel()
        return await loop.run_in_executor(pool, threading.get_ident)

    with ThreadPoolExecutor(1) as pool:
        assert run_sim(main(), loop()) != threading.get_ident()


def test_the_clock_stands_still_for_a_thread_whose_result_nobody_wants(no_leaks):
    go, ended = threading.Event(), threading.Event()

    def work():
        assert go.wait(600.0)
        ended.set()

    async def main():
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        working.cancel()
        asyncio.get_running_loop().call_soon(go.set)
        await asyncio.sleep(0.001)
        return ended.is_set()

    assert run_sim(main())


def test_names_of_hosts_are_found(no_leaks):
    async def main():
        return await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    assert run_sim(main())


def test_a_thread_that_waits_for_the_loop_is_a_deadlock(no_leaks):
    class Impatient(SimLoop):
        threads_s = 0.01

    timer = threading.Event()

    async def main():
        asyncio.get_running_loop().call_later(1.0, timer.set)
        await asyncio.to_thread(timer.wait, 600.0)

    try:
        with pytest.raises(Deadlock, match=r"0\.01 s of real time.*\n.*main \("):
            run_sim(main(), Impatient())
    finally:
        timer.set()
        for thread in threading.enumerate():
            if thread.name.startswith("asyncio"):
                thread.join(600.0)


def test_a_thread_that_the_loop_knows_nothing_of_is_refused():
    threads = []

    async def main():
        loop = asyncio.get_running_loop()
        called = loop.create_future()
        threads.append(threading.Thread(target=loop.call_soon_threadsafe, args=(called.set_result, None)))
        threads[0].start()
        # the clock moves as far as the machine likes until the thread's call is there
        while not called.done():  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    with pytest.raises(NotSimulated, match=r"^thread Thread-\d.*asyncio\.to_thread"):
        run_sim(main(), limit_s=math.inf)
    threads[0].join(600.0)


def test_child_processes_are_refused():
    async def asked_of_asyncio():
        await asyncio.create_subprocess_exec("true")

    async def asked_of_a_shell():
        await asyncio.create_subprocess_shell("true")

    async def of_an_engine():
        async with synthetic_engine(synthetic_config(process="worker")):
            pass

    for refused in (asked_of_asyncio, asked_of_a_shell):
        with pytest.raises(NotSimulated, match=r"'true'.*asyncio\.run"):
            run_sim(refused())
    with pytest.raises(RunnerError, match=r"NotSimulated.*process=\"inline\""):
        run_sim(of_an_engine())
