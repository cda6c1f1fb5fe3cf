"""The gate between verbs that use the same keys, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from fdasync_mooncake.gate import KeyGate


def play(run_sim, *calls):
    """Which of the calls ("read" or "write", keys) ran at a time with others, at most."""

    async def main():
        gate = KeyGate()
        running: Counter[int] = Counter()
        together: set[tuple[int, int]] = set()

        async def call(number, verb, keys):
            async with gate.reading(keys) if verb == "read" else gate.writing(keys):
                together.update((min(other, number), max(other, number)) for other in running)
                running[number] = 1
                await asyncio.sleep(1)
                del running[number]

        await asyncio.gather(*[call(number, *each) for number, each in enumerate(calls)])
        return together

    return run_sim(main())


@pytest.mark.parametrize(
    ("one", "other", "at_a_time"),
    [
        (("read", "ab"), ("read", "bc"), True),
        (("read", "ab"), ("write", "bc"), False),
        (("write", "ab"), ("read", "bc"), False),
        (("write", "ab"), ("write", "bc"), False),
        (("write", "ab"), ("write", "cd"), True),
        (("write", "ab"), ("read", "cd"), True),
        (("write", "aa"), ("write", "bb"), True),
        (("write", ""), ("write", "a"), True),
    ],
)
def test_which_calls_may_run_at_a_time(run_sim, one, other, at_a_time):
    assert play(run_sim, one, other) == ({(0, 1)} if at_a_time else set())


def test_any_crowd_gets_through_and_no_writer_meets_another(run_sim):
    random = Random(5)
    calls = [(random.choice(("read", "write")), random.sample("abcdefgh", random.randint(1, 4))) for _ in range(200)]
    for one, other in play(run_sim, *calls):
        (verb, keys), (other_verb, other_keys) = calls[one], calls[other]
        assert (verb, other_verb) == ("read", "read") or not set(keys) & set(other_keys)


def test_one_that_is_cancelled_holds_nothing(run_sim):
    async def main():
        gate = KeyGate()

        async def write(seconds):
            async with gate.writing("a"):
                await asyncio.sleep(seconds)

        first, waiting, last = (asyncio.ensure_future(write(seconds)) for seconds in (10, 10, 0))
        await asyncio.sleep(1)
        waiting.cancel()
        first.cancel()
        await asyncio.wait_for(last, 1)
        await asyncio.wait([first, waiting])
        async with gate.reading("a"), gate.reading("a"):
            pass

    run_sim(main())
