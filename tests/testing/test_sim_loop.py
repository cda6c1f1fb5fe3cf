"""Virtual time: timers in order, no time for what needs none, deadlocks and polling are errors."""

from __future__ import annotations

import asyncio
import functools
from random import Random

import pytest

from fdasync.testing import Deadlock, LateLoop, Livelock, run_sim

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
