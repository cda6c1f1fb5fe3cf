"""Hashing sequences again when the weights changed: `prepare.py`, `Rehasher`."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import Rehasher, hash_blocks, salted
from fdasync.events.actions import HashAgain
from fdasync.events.bus import EventBus

pytestmark = pytest.mark.both_loops

SIZE = 4


class Bench:
    def __init__(self):
        self.namespace = b"one"
        self.errors: list[BaseException] = []
        self.woken = asyncio.Event()
        self.bus = EventBus(lambda: 1.0)
        self.bus.attach(self.woken.set)
        self.rehasher = Rehasher(self.bus, SIZE, lambda: self.namespace, self.errors.append)
        self.events: list[object] = []

    def add(self, key, tokens=range(9), salt=""):
        self.rehasher.add(HashAgain(key, array("i", tokens).tobytes(), salt))

    async def hashed(self, count):
        """The next events, within a bounded number of turns of the loop."""
        for _ in range(200):
            self.events += self.bus.drain()
            if len(self.events) >= count:
                found, self.events = self.events[:count], self.events[count:]
                return found
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.events)} of {count} were hashed")


async def test_each_ends_in_one_event_with_identities_under_the_namespace_of_now():
    bench = Bench()
    bench.add(1, range(9), "s")
    bench.namespace = b"two"
    (event,) = await bench.hashed(1)
    root = salted(b"two", "s")
    assert (event.key, event.namespace, event.root) == (1, b"two", root)
    assert event.block_keys == tuple(block_keys(root, range(9), SIZE))
    assert len(event.block_keys) == 2
    await bench.rehasher.aclose()


async def test_they_are_hashed_in_order_one_in_a_turn():
    bench = Bench()
    for key in range(5):
        bench.add(key)
    turns = []
    while len(bench.events) < 5:
        await asyncio.sleep(0)
        turns.append(len(bench.bus.drain()))
        bench.events += [None] * turns[-1]
        assert len(turns) < 100
    assert max(turns) == 1
    bench.events.clear()
    for key in range(5):
        bench.add(key)
    assert [event.key for event in await bench.hashed(5)] == list(range(5))
    await bench.rehasher.aclose()


async def test_long_ones_yield_to_the_loop_and_are_hashed_under_one_namespace():
    bench = Bench()
    tokens = [token % 100 for token in range(SIZE * 256 * 4)]
    bench.add(1, tokens)
    for _ in range(2):
        await asyncio.sleep(0)
    assert bench.bus.drain() == []
    # half done: what is published tells the namespace that all of it was hashed under
    bench.namespace = b"two"
    (event,) = await bench.hashed(1)
    assert event.namespace == b"one"
    assert event.block_keys == tuple(block_keys(salted(b"one", ""), tokens, SIZE))
    await bench.rehasher.aclose()


@pytest.mark.parametrize("turns", range(12))
async def test_one_that_comes_whenever_the_last_is_done_is_not_forgotten(turns):
    """Whatever callback of the loop adds it, be it the one between the end of the work and word of that end."""
    bench = Bench()
    loop = asyncio.get_running_loop()

    def later(left):
        if left:
            loop.call_soon(later, left - 1)
        else:
            bench.add(2)

    # runs behind the work in each turn of the loop
    bench.add(1)
    loop.call_soon(later, turns)
    assert [event.key for event in await bench.hashed(2)] == [1, 2]
    await bench.rehasher.aclose()


async def test_it_starts_again_when_it_had_nothing_to_do():
    bench = Bench()
    for key in range(3):
        bench.add(key)
        assert [event.key for event in await bench.hashed(1)] == [key]
        for _ in range(5):
            await asyncio.sleep(0)
    await bench.rehasher.aclose()


@pytest.mark.parametrize("busy", [True, False])
async def test_aclose_stops_it_and_may_be_called_again(busy):
    bench = Bench()
    if busy:
        bench.add(1, [1] * (SIZE * 256 * 8))
        await asyncio.sleep(0)
    await bench.rehasher.aclose()
    await bench.rehasher.aclose()
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.bus.drain() == []
    assert bench.errors == []


async def test_what_must_not_happen_is_told():
    bench = Bench()

    def broken():
        raise ValueError("no namespace")

    bench.rehasher._namespace = broken
    bench.add(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [type(error) for error in bench.errors] == [ValueError]
    await bench.rehasher.aclose()


def test_a_salt_is_part_of_the_root():
    roots = {salted(namespace, salt) for namespace in (b"", b"a") for salt in ("", "a", "\u20ac")}
    assert len(roots) == 6


@pytest.mark.parametrize("length", [0, 3, 4, 4 * 256, 4 * 256 + 5, 4 * 700])
async def test_hashing_in_slices_is_hashing_at_once(length):
    tokens = [token % 50 for token in range(length)]
    assert await hash_blocks(b"root", tokens, SIZE) == tuple(block_keys(b"root", tokens, SIZE))
