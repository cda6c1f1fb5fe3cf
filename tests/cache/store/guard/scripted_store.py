"""A store whose answers a test scripts, and the guard around it, for tests of the guard and of wrappers."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest

from fdasync.cache.store.base import DONE, Capabilities, Item, Store, StoreUsage, finish
from fdasync.cache.store.guard import GuardedStore, GuardLimits
from fdasync.cache.store.guard.breaker import PROBE_KEY
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import StoreUnavailable
from fdasync.events.catalog import BreakerChanged
from fdasync.ipc.deadlines import Closing
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync.testing import run_sim

NBYTES = 1000
LATER = StoreUnavailable("scripted", "later")


class Scripted(Store):
    """Answers each call by the next line of its script, then with success.

    A line is an exception (raised), a number (seconds to take), a future (waited for, cancelled or not), a coroutine
    function, or the answer. Probes of a guard are answered beside the script, unless `probes`.
    """

    config_type = MemoryConfig

    def __init__(self, *script, probes=False, **limits):
        super().__init__(MemoryConfig())
        self.probes = probes
        self.script = list(script)
        self.capabilities = Capabilities(name="scripted", durability="none", **limits)
        self.calls = []  # (verb, argument)
        self.times = []  # of the calls
        self.life = []
        self.running = 0
        self.most_running = 0
        self.most_nbytes = 0
        self._nbytes = 0

    async def _answer(self, verb, argument, success):
        argument = list(argument)
        nbytes = sum(item.nbytes for item in argument if isinstance(item, Item))
        self.calls.append((verb, argument))
        self.times.append(asyncio.get_running_loop().time())
        self.running += 1
        self._nbytes += nbytes
        self.most_running = max(self.most_running, self.running)
        self.most_nbytes = max(self.most_nbytes, self._nbytes)
        try:
            line = self.script.pop(0) if self.script else success
            if isinstance(line, BaseException):
                raise line
            if isinstance(line, float):
                await asyncio.sleep(line)
                return success
            if isinstance(line, asyncio.Future):
                return await finish(line) or success
            return line
        finally:
            self.running -= 1
            self._nbytes -= nbytes

    async def open(self, regions):
        self.life.append("open")
        await self._answer("open", (), None) if self.script and self.script[0] == "open" else None

    async def exists_prefix(self, keys):
        if keys == [PROBE_KEY] and not self.probes:
            return 0
        return await self._answer("exists_prefix", keys, len(keys))

    async def get_into(self, items):
        return await self._answer("get_into", items, [DONE] * len(items))

    async def put(self, items):
        return await self._answer("put", items, [DONE] * len(items))

    async def delete(self, keys):
        return await self._answer("delete", keys, len(keys))

    async def usage(self):
        return await self._answer("usage", (), StoreUsage(objects=3))

    async def kill(self, why):
        self.life.append(f"kill: {why}")
        return False

    async def aclose(self):
        self.life.append("aclose")


class Guarded(GuardedStore):
    """Notes its breaker's states and when they came, and every call that it tells of."""

    def __init__(self, inner, *, close_s=10.0, **limits):
        self.states = []
        self.told = []
        # a breaker that a late call opens is closed again soon after
        values = GuardLimits(**{"call_s": 1000.0, "retry_s": 1e-3, **limits})
        super().__init__(inner, values, name="scripted", publish=self._note, closing=Closing(close_s))

    def _note(self, event):
        if isinstance(event, BreakerChanged):
            assert event.problem
            self.states.append((event.state, round(now(), 3)))
        else:
            self.told.append(event)

    async def refuses(self):
        calls, begun = len(self.inner.calls), now()
        with pytest.raises(StoreUnavailable, match="gets no calls for now"):
            await self.put(items("a"))
        assert (now(), len(self.inner.calls)) == (begun, calls)


def never_ends():
    return asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def opened(store):
    """A store of one region of 64 KiB, closed at the end."""
    region = SharedRegion.create("tests", 1 << 16)
    try:
        await store.open([region])
        yield region
    finally:
        await store.aclose()
        region.close()


@contextlib.asynccontextmanager
async def guarded(inner, **limits):
    """A guard around `inner`, open, and `inner`; closed at the end."""
    store = Guarded(inner, **limits)
    async with opened(store):
        yield store, inner


def simulated(test):
    """An async test as a plain one, in virtual time."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        run_sim(test(*args, **kwargs))

    return run


def puts(store, names):
    """A put of one item of each name, begun."""
    return [asyncio.ensure_future(store.put(items(name))) for name in names]


def logged():
    """What asyncio is about to log, from now on."""
    contexts = []
    asyncio.get_running_loop().set_exception_handler(lambda *context: contexts.append(context))
    return contexts


def item(name, nbytes=NBYTES, offset=0):
    return Item(str(name), (Part(0, offset, nbytes),))


def items(*names):
    """With parts of their own."""
    return [item(name, NBYTES, NBYTES * place) for place, name in enumerate(names)]


def memory(**config):
    return MemoryStore(MemoryConfig(**config))


def now():
    return asyncio.get_running_loop().time()
