"""The file store's threads: work that is taken item by item, jobs, their turns, their end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref

import pytest

from fdasync.cache.store.file.allocator import Threads


class Gate:
    """Work that waits in its thread until it is let go; counts who is in it."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, item: object) -> object:
        self.entered.release()
        assert self.go.acquire(timeout=300), "nobody let it go"
        return item

    async def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.entered.acquire, timeout=300), "too few came"

    def let(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


@pytest.fixture
async def threads():
    threads = Threads(4)
    yield threads
    await threads.close()


async def test_results_are_in_order_and_each_item_is_worked_on_once(threads):
    done: list[int] = []

    def work(item: int) -> int:
        done.append(item)
        return item * item

    assert await threads.each([], work) == []
    for count in (1, 2, 3, 4, 5, 100, 1000):
        done.clear()
        assert await threads.each(range(count), work) == [number * number for number in range(count)]
        assert sorted(done) == list(range(count))


async def test_all_threads_take_part_in_one_call(threads):
    gate = Gate()
    call = asyncio.ensure_future(threads.each(range(9), gate))
    await gate.wait_for(4)
    # each that is through takes the next one, whatever the others do
    for _ in range(5):
        gate.let(1)
        await gate.wait_for(1)
    gate.let(4)
    assert await call == list(range(9))


async def test_a_thread_that_is_free_helps_the_call_that_came_first(threads):
    gate, later = Gate(), Gate()
    one = asyncio.ensure_future(threads.each(["a"], gate))
    await gate.wait_for(1)
    # one is busy: the other three take these
    two = asyncio.ensure_future(threads.each(range(5), gate))
    await gate.wait_for(3)
    three = asyncio.ensure_future(threads.each("xy", later))
    await asyncio.sleep(0)
    gate.let(2)
    # what is left of the second call goes before the third
    await gate.wait_for(2)
    assert not later.entered.acquire(blocking=False)
    gate.let(4)
    await later.wait_for(2)
    later.let(2)
    assert await asyncio.gather(one, two, three) == [["a"], [0, 1, 2, 3, 4], ["x", "y"]]


async def test_an_error_is_raised_when_all_have_ended(threads):
    gate = Gate()

    def work(item: int) -> object:
        if item == 0:
            raise ZeroDivisionError("the first")
        return gate(item)

    call = asyncio.ensure_future(threads.each(range(6), work))
    await gate.wait_for(4)
    gate.let(4)
    done, _ = await asyncio.wait([call], timeout=0.05)
    assert not done
    await gate.wait_for(1)
    gate.let(1)
    with pytest.raises(ZeroDivisionError, match="the first"):
        await call
    # and the threads are as good as before
    assert await threads.each(range(20), lambda item: item) == list(range(20))


@pytest.mark.parametrize("how", ["result", "error"])
async def test_a_cancellation_waits_for_the_end(threads, how):
    gate = Gate()

    def work(item: int) -> object:
        gate(item)
        return item if how == "result" else 1 // 0

    call = asyncio.ensure_future(threads.each(range(6), work))
    await gate.wait_for(4)
    for _ in range(3):
        call.cancel()
        done, _ = await asyncio.wait([call], timeout=0.01)
        assert not done
    gate.let(6)
    await asyncio.wait([call])
    assert call.cancelled()
    assert await threads.each(range(20), lambda item: item) == list(range(20))


async def test_a_job_has_its_turn_before_a_long_call_ends(threads):
    gate = Gate()
    call = asyncio.ensure_future(threads.each(range(400), gate))
    await gate.wait_for(4)
    job = asyncio.ensure_future(threads.run(lambda: "job"))
    await asyncio.sleep(0)
    gate.let(4)
    assert await asyncio.wait_for(job, 300) == "job"
    assert not call.done()
    gate.let(396)
    assert await call == list(range(400))


async def test_a_call_has_its_turn_while_jobs_wait_all_the_time(threads):
    """Puts that sync are jobs: more of them than threads must not keep a get out for good."""
    stop = threading.Event()

    async def busy() -> None:
        while not stop.is_set():
            await threads.run(stop.wait, 0.002)

    crowd = [asyncio.ensure_future(busy()) for _ in range(16)]
    await asyncio.sleep(0)
    call = asyncio.ensure_future(threads.each(range(12), lambda item: item))
    done, _ = await asyncio.wait([call], timeout=300)
    stop.set()
    await asyncio.wait([*crowd, call])
    assert done, "no thread took an item while jobs waited"
    assert call.result() == list(range(12))


async def test_any_crowd_of_calls_and_jobs_gets_through(threads):
    """Many at a time, some of them cancelled, some that raise: all end, and none with another's results."""
    chance = random.Random(11)
    work_done: dict[tuple[int, int], int] = {}
    lock = threading.Lock()

    def work(item: tuple[int, int]) -> tuple[int, int]:
        with lock:
            work_done[item] = work_done.get(item, 0) + 1
        if item[0] % 7 == 0 and item[1] == 3:
            raise KeyError(item)
        if item[1] % 5 == 0:
            sum(range(200))
        return item

    async def call(number: int, count: int) -> None:
        items = [(number, place) for place in range(count)]
        if number % 7 == 0 and count > 3:
            with pytest.raises(KeyError):
                await threads.each(items, work)
        else:
            assert await threads.each(items, work) == items
        if number % 3 == 0:
            assert await threads.run(str, number) == str(number)

    for turn in range(30):
        sizes = [chance.randint(1, 20) for _ in range(40)]
        calls = [asyncio.ensure_future(call(40 * turn + number, count)) for number, count in enumerate(sizes)]
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        gone = chance.sample(calls, 5)
        for each in gone:
            each.cancel()
        async with asyncio.timeout(300):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        for each, result in zip(calls, ended, strict=True):
            assert result is None or (each in gone and isinstance(result, asyncio.CancelledError))
    assert set(work_done.values()) == {1}


async def test_nothing_of_a_call_is_kept(threads):
    """Items name a caller's memory, which may be unmapped once the threads are closed."""

    class Thing:
        pass

    def refuse(item: Thing) -> None:
        raise ZeroDivisionError

    things = [Thing() for _ in range(20)]
    known = [weakref.ref(thing) for thing in things]
    gc.disable()
    try:
        await threads.each(things, id)
        with pytest.raises(ZeroDivisionError):
            await threads.each(things, refuse)
        await threads.close()
        things.clear()
        assert [ref for ref in known if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.ci
async def test_the_end_comes_right_after_the_last_call():
    """What a thread does after the last item of a call must not come after the end."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    for turn in range(300):
        threads = Threads(1 + turn % 4)
        await asyncio.gather(threads.each(range(turn % 9), str), threads.each(range(5), str))
        await threads.run(str, turn)
        await threads.close()
        assert not [each for each in threading.enumerate() if each.name.startswith("fdasync-file")]
    await asyncio.sleep(0.01)
    assert errors == []
