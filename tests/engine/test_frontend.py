"""The frontend: a bounded number of samples inside, and a fair queue before it (`AdmissionLimiter`)."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

import pytest

from fdasync.engine.frontend import AdmissionLimiter
from fdasync.scheduler import Candidate
from fdasync.scheduler.state.policy import own_policy

pytestmark = pytest.mark.both_loops


class Line(AdmissionLimiter):
    """An admission limiter with a policy; those who enter arrive in the order of their calls."""

    def __init__(self, limit, policy="arrival"):
        super().__init__(limit, own_policy(policy, {}))
        self.arrivals = 0

    async def come(self, count, *, priority=0, prompt_tokens=1, arrived_at=0.0):
        self.arrivals += 1
        candidate = Candidate(
            priority=priority, arrival=self.arrivals, arrived_at=arrived_at, prompt_tokens=prompt_tokens, group=0
        )
        await self.enter(count, candidate)


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


async def test_requests_without_a_place_wait_in_order_of_arrival():
    limiter = Line(2)
    order = []

    async def come(name, count):
        await limiter.come(count)
        order.append(name)

    tasks = [asyncio.ensure_future(come(name, count)) for name, count in [("a", 1), ("b", 1), ("c", 2), ("d", 1)]]
    await settle()
    assert (order, limiter.used, limiter.num_waiting) == (["a", "b"], 2, 2)
    limiter.leave(1)
    await settle()
    # there is a place for d, but c was first
    assert order == ["a", "b"]
    limiter.leave(1)
    await settle()
    assert order == ["a", "b", "c"]
    limiter.leave(2)
    await settle()
    assert order == ["a", "b", "c", "d"]
    assert limiter.used == 1
    await asyncio.wait(tasks)


@pytest.mark.parametrize(
    ("policy", "order"), [("arrival", ["a", "d", "b", "c"]), ("shortest-prompt-first", ["a", "d", "c", "b"])]
)
async def test_the_policy_says_which_request_is_next(policy, order):
    limiter = Line(1, policy)
    entered = []

    async def come(name, **values):
        await limiter.come(1, **values)
        entered.append(name)

    asked = {"a": {"prompt_tokens": 9}, "b": {"prompt_tokens": 30}, "c": {"prompt_tokens": 3}, "d": {"priority": 1}}
    tasks = [asyncio.ensure_future(come(name, **values)) for name, values in asked.items()]
    await settle()
    for _ in asked:
        limiter.leave(1)
        await settle()
    assert entered == order
    await asyncio.wait(tasks)


async def test_no_request_slips_past_the_queue():
    limiter = Line(2)
    await limiter.come(1)
    large = asyncio.ensure_future(limiter.come(2))
    await settle()
    small = asyncio.ensure_future(limiter.come(1))
    await settle()
    assert not small.done()
    limiter.leave(1)
    await settle()
    assert (large.done(), small.done(), limiter.used) == (True, False, 2)
    limiter.leave(2)
    await small


async def test_the_head_that_gives_up_lets_the_next_one_in():
    limiter = Line(2)
    await limiter.come(1)
    large, small = asyncio.ensure_future(limiter.come(2)), asyncio.ensure_future(limiter.come(1))
    await settle()
    large.cancel()
    await settle()
    assert large.cancelled()
    assert small.done()
    assert (limiter.used, limiter.num_waiting) == (2, 0)


async def test_a_place_given_to_a_request_that_was_cancelled_meanwhile_comes_back():
    limiter = Line(1)
    await limiter.come(1)
    first, second = asyncio.ensure_future(limiter.come(1)), asyncio.ensure_future(limiter.come(1))
    await settle()
    limiter.leave(1)  # the first has the place now, and does not know yet
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
    assert limiter.used == 1


async def test_somebody_leaves_between_a_cancel_and_its_arrival():
    limiter = Line(1)
    await limiter.come(1)
    first, second = asyncio.ensure_future(limiter.come(1)), asyncio.ensure_future(limiter.come(1))
    await settle()
    first.cancel()
    limiter.leave(1)
    await settle()
    assert first.cancelled()
    assert second.done()
    assert (limiter.used, limiter.num_waiting) == (1, 0)


@pytest.mark.ci(after=16)
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("seed", range(30))
async def test_any_interleaving_keeps_bounds_and_order(seed, in_step):
    rng = Random(seed)
    limit = rng.randint(1, 5)
    limiter = Line(limit)
    tasks: dict[int, tuple[int, asyncio.Task[None]]] = {}
    entered: list[int] = []
    inside: deque[int] = deque()
    cancelled: set[int] = set()

    async def come(number, count):
        await limiter.come(count)
        entered.append(number)
        inside.append(count)

    for number in range(rng.randint(5, 40)):
        for _ in range(rng.randint(0, 3)):
            action = rng.random()
            waiting = [name for name, (_, task) in tasks.items() if not task.done()]
            if action < 0.4 and inside:
                limiter.leave(inside.popleft())
            elif action < 0.6 and waiting:
                name = rng.choice(waiting)
                cancelled.add(name)
                tasks[name][1].cancel()
            else:
                await asyncio.sleep(0)
            assert 0 <= limiter.used <= limit
            if in_step:
                await settle()
        count = rng.randint(1, limit)
        tasks[number] = (count, asyncio.ensure_future(come(number, count)))
        if in_step:
            await settle()
    while not all(task.done() for _, task in tasks.values()):
        await settle()
        assert sum(inside) == limiter.used <= limit
        if inside:
            limiter.leave(inside.popleft())
    # who has been given a place wakes a little later; only when all have woken is the order theirs
    assert not in_step or entered == sorted(entered)
    # everybody got in, or was cancelled: nobody waits for ever, no place is lost
    assert set(entered) | cancelled == set(tasks)
    assert all(task.cancelled() or task.exception() is None for _, task in tasks.values())
    assert (limiter.used, limiter.num_waiting) == (sum(inside), 0)
