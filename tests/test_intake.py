"""The door: a bounded number of samples inside, and a fair queue before it (`door.Intake`)."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

import pytest

from fdasync.engine.frontend import Intake

pytestmark = pytest.mark.both_loops


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


async def test_who_finds_no_place_waits_in_order_of_arrival():
    intake = Intake(2)
    order = []

    async def come(name, count):
        await intake.enter(count)
        order.append(name)

    tasks = [asyncio.ensure_future(come(name, count)) for name, count in [("a", 1), ("b", 1), ("c", 2), ("d", 1)]]
    await settle()
    assert (order, intake.used, intake.num_waiting) == (["a", "b"], 2, 2)
    intake.leave(1)
    await settle()
    # there is a place for d, but c was first
    assert order == ["a", "b"]
    intake.leave(1)
    await settle()
    assert order == ["a", "b", "c"]
    intake.leave(2)
    await settle()
    assert order == ["a", "b", "c", "d"]
    assert intake.used == 1
    await asyncio.wait(tasks)


async def test_nobody_slips_past_the_queue():
    intake = Intake(2)
    await intake.enter(1)
    large = asyncio.ensure_future(intake.enter(2))
    await settle()
    small = asyncio.ensure_future(intake.enter(1))
    await settle()
    assert not small.done()
    intake.leave(1)
    await settle()
    assert (large.done(), small.done(), intake.used) == (True, False, 2)
    intake.leave(2)
    await small


async def test_the_head_that_gives_up_lets_the_next_one_in():
    intake = Intake(2)
    await intake.enter(1)
    large, small = asyncio.ensure_future(intake.enter(2)), asyncio.ensure_future(intake.enter(1))
    await settle()
    large.cancel()
    await settle()
    assert large.cancelled()
    assert small.done()
    assert (intake.used, intake.num_waiting) == (2, 0)


async def test_a_place_given_to_who_was_cancelled_meanwhile_comes_back():
    intake = Intake(1)
    await intake.enter(1)
    first, second = asyncio.ensure_future(intake.enter(1)), asyncio.ensure_future(intake.enter(1))
    await settle()
    intake.leave(1)  # the first has the place now, and does not know yet
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
    assert intake.used == 1


async def test_somebody_leaves_between_a_cancel_and_its_arrival():
    intake = Intake(1)
    await intake.enter(1)
    first, second = asyncio.ensure_future(intake.enter(1)), asyncio.ensure_future(intake.enter(1))
    await settle()
    first.cancel()
    intake.leave(1)
    await settle()
    assert first.cancelled()
    assert second.done()
    assert (intake.used, intake.num_waiting) == (1, 0)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("seed", range(30))
async def test_any_interleaving_keeps_bounds_and_order(seed, in_step):
    rng = Random(seed)
    limit = rng.randint(1, 5)
    intake = Intake(limit)
    tasks: dict[int, tuple[int, asyncio.Task[None]]] = {}
    entered: list[int] = []
    inside: deque[int] = deque()
    cancelled: set[int] = set()

    async def come(number, count):
        await intake.enter(count)
        entered.append(number)
        inside.append(count)

    for number in range(rng.randint(5, 40)):
        for _ in range(rng.randint(0, 3)):
            action = rng.random()
            waiting = [name for name, (_, task) in tasks.items() if not task.done()]
            if action < 0.4 and inside:
                intake.leave(inside.popleft())
            elif action < 0.6 and waiting:
                name = rng.choice(waiting)
                cancelled.add(name)
                tasks[name][1].cancel()
            else:
                await asyncio.sleep(0)
            assert 0 <= intake.used <= limit
            if in_step:
                await settle()
        count = rng.randint(1, limit)
        tasks[number] = (count, asyncio.ensure_future(come(number, count)))
        if in_step:
            await settle()
    while not all(task.done() for _, task in tasks.values()):
        await settle()
        assert sum(inside) == intake.used <= limit
        if inside:
            intake.leave(inside.popleft())
    # who has been given a place wakes a little later; only when all have woken is the order theirs
    assert not in_step or entered == sorted(entered)
    # everybody got in, or was cancelled: nobody waits for ever, no place is lost
    assert set(entered) | cancelled == set(tasks)
    assert all(task.cancelled() or task.exception() is None for _, task in tasks.values())
    assert (intake.used, intake.num_waiting) == (sum(inside), 0)
