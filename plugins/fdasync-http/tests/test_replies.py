"""Streams of several prompts in one: mixed, and ended together."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_http.replies import interleaved


class Source:
    """A stream of a name, whose items a test lets go; `ended` once it was closed or ran out."""

    def __init__(self, name, error=None):
        self.name = name
        self.error = error
        self.ready = asyncio.Semaphore(0)
        self.taken = 0
        self.ended = False

    async def items(self, count):
        try:
            for number in range(count):
                await self.ready.acquire()
                self.taken += 1
                yield self.name, number
            if self.error is not None:
                raise self.error
        finally:
            self.ended = True

    def let(self, count=1):
        for _ in range(count):
            self.ready.release()


async def test_items_come_as_they_are_made():
    one, two = Source("one"), Source("two")
    mixed = interleaved([one.items(2), two.items(2)])
    two.let()
    assert await anext(mixed) == ("two", 0)
    one.let()
    assert await anext(mixed) == ("one", 0)
    one.let()
    assert await anext(mixed) == ("one", 1)
    two.let()
    assert [item async for item in mixed] == [("two", 1)]
    assert one.ended
    assert two.ended


async def test_a_slow_reader_lets_streams_wait():
    source = Source("one")
    mixed = interleaved([source.items(9)])
    source.let(9)
    await anext(mixed)
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.taken <= 2
    await mixed.aclose()


async def test_the_first_error_ends_the_others_and_is_raised():
    one, two, three = Source("one"), Source("two", error=KeyError("two")), Source("three", error=KeyError("three"))
    two.let()
    three.let()
    mixed = interleaved([source.items(1) for source in (one, two, three)])
    with pytest.raises(KeyError):
        _ = [item async for item in mixed]
    assert all(source.ended for source in (one, two, three))


async def test_closing_ends_all_of_them():
    sources = [Source("one"), Source("two"), Source("three")]
    sources[0].let(2)
    mixed = interleaved([source.items(5) for source in sources])
    await anext(mixed)
    await mixed.aclose()
    assert [source.ended for source in sources] == [True] * 3
    assert sources[0].taken <= 2
