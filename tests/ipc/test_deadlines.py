"""Deadlines that look once more: nobody is late whose answer came while the loop was blocked, and everybody else is."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from fdasync.ipc.deadlines import GRACE_S, DeadlineTimer, Within, wait_within
from fdasync.testing import run_sim
from tests.support.helpers import hold_up

pytestmark = pytest.mark.both_loops


async def answers(ours: socket.socket) -> bytes:
    """What another process sends, through a few tasks, as through a stack of wrappers."""
    loop = asyncio.get_running_loop()
    work: asyncio.Future[bytes] = asyncio.ensure_future(loop.sock_recv(ours, 1))
    for _ in range(3):

        async def outer(inner: asyncio.Future[bytes]) -> bytes:
            return await inner

        work = asyncio.ensure_future(outer(work))
    return await work


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def come_while_blocked(theirs: socket.socket, blocked_s: float) -> None:
    theirs.send(b"x")
    hold_up(blocked_s)


async def test_what_came_while_the_loop_was_blocked_is_in_time(pair):
    ours, theirs = pair
    loop = asyncio.get_running_loop()
    for blocked_s in (0.2, 0.02, 0.0205, 0.021, 0.015):
        loop.call_later(0.001, come_while_blocked, theirs, blocked_s)
        async with Within(0.02):
            assert await answers(ours) == b"x"
        loop.call_later(0.001, come_while_blocked, theirs, blocked_s)
        waited = asyncio.ensure_future(answers(ours))
        assert await wait_within([waited], 0.02) == ({waited}, set())


async def test_what_never_comes_is_late_after_a_block_too(pair):
    ours, _ = pair
    loop = asyncio.get_running_loop()
    loop.call_soon(hold_up, 0.1)
    started = loop.time()
    with pytest.raises(TimeoutError):
        async with Within(0.02):
            await answers(ours)
    assert loop.time() - started >= 0.1 + GRACE_S - 0.002
    waited = asyncio.ensure_future(answers(ours))
    assert await wait_within([waited], 0.0) == (set(), {waited})
    waited.cancel()
    await asyncio.wait([waited])


async def test_a_loop_that_is_blocked_again_and_again_ends_its_waits():
    loop = asyncio.get_running_loop()
    blocks = []

    def block() -> None:
        hold_up(0.06)
        blocks.append(loop.call_later(0.001, block))

    block()
    with pytest.raises(TimeoutError):
        async with Within(0.01):
            await loop.create_future()
    blocks[-1].cancel()
    assert len(blocks) < 40


def test_a_punctual_loop_keeps_deadlines_to_the_moment():
    async def play():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with Within(3.0):
                await loop.create_future()
        assert loop.time() == pytest.approx(3.0, abs=1e-6)
        never = loop.create_future()
        assert await wait_within([never], 2.0) == (set(), {never})
        assert loop.time() == pytest.approx(5.0, abs=1e-6)
        passed = []
        timer = DeadlineTimer(loop, 6.0, lambda: passed.append(loop.time()))
        DeadlineTimer(loop, 6.0, lambda: passed.append(loop.time()))
        timer.cancel()
        timer.cancel()
        await asyncio.sleep(2.0)
        assert passed == [pytest.approx(6.0, abs=1e-6)]

    run_sim(play())


async def test_cancelling_is_not_a_deadline():
    loop = asyncio.get_running_loop()
    work = loop.create_future()

    async def waits(how: str) -> None:
        if how == "block":
            async with Within(60.0):
                await loop.create_future()
        else:
            await wait_within([work], 60.0)

    for how in ("block", "futures"):
        task = asyncio.ensure_future(waits(how))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not work.done()


async def test_a_task_that_outlived_a_cancellation_has_deadlines():
    loop = asyncio.get_running_loop()

    async def outlives() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await loop.create_future()
        with pytest.raises(TimeoutError):
            async with Within(0.01):
                await loop.create_future()
        _, left = await wait_within([loop.create_future()], 0.01)
        assert len(left) == 1
        return asyncio.current_task().cancelling()

    task = asyncio.ensure_future(outlives())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1


async def test_a_cancellation_beside_the_deadline_goes_through():
    async def waits() -> None:
        async with Within(60.0) as within:
            within._passed()
            asyncio.current_task().cancel()
            await asyncio.sleep(60.0)

    task = asyncio.ensure_future(waits())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1


async def test_the_block_s_own_errors_come_through():
    with pytest.raises(ZeroDivisionError):
        async with Within(60.0):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError, match="its own"):
        async with Within(60.0):
            raise TimeoutError("its own")


async def test_waiting_ends_with_the_first_where_that_is_asked_for():
    loop = asyncio.get_running_loop()
    one, two = loop.create_future(), loop.create_future()
    loop.call_soon(one.set_result, None)
    done, left = await wait_within([one, two], 60.0, return_when=asyncio.FIRST_COMPLETED)
    assert (done, left) == ({one}, {two})
