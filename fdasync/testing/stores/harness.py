"""What the conformance suite for stores stands on: one open store, shared regions, and every wait bounded.

Parts lie at odd offsets in several regions with guard bytes around them, and keys are new in every test, so that
a store may keep what other tests put. Knows the contract (`store/base.py`) only. Used by `stores/suite.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fdasync.cache.store.base import Item, Outcome
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync.testing.harness.verdicts import check, equal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence

    from fdasync.cache.store.base import Store

_GUARD = 0xA5
_GUARD_NBYTES = 67
# the first is large enough that few parts of it break a usual limit; pages that nobody touches cost nothing
_REGIONS_NBYTES = (34 << 20, (16 << 20) + 4096, (8 << 20) + 12)
_AFTER_S = 10.0

T = TypeVar("T")
S = TypeVar("S", bound="StoreHooks")


class StoreHooks:
    """What an adopter of `StoreTests` says about its store.

    Attributes:
        may_forget: it drops objects unasked in these tests (a tiny cap, a lossy store): a miss is then no error, wrong
            bytes still are.
        tells_races: of two puts of one key at a time, or in one call, exactly one is told "done". False for a store
            whose service cannot tell.
        verb_s: how long one verb may take, in seconds.
        limit_s: how long one test may take, in seconds.
        slow_to_open: opening it takes a process or a server: the state machine opens one for all of its runs.
        examples: runs of the state machine.
        steps: of each run.
    """

    may_forget = False
    tells_races = True
    verb_s = 20.0
    limit_s = 60.0
    slow_to_open = False
    examples = 15
    steps = 25

    def make(self) -> Store:
        """A store, not opened. Called again only after the one before was closed, so one place will do."""
        raise NotImplementedError

    def again(self, closed: Store) -> Store | None:
        """A new store object, not opened, on the place of one that was closed; for those that outlive their end."""
        del closed
        return None

    def make_capped(self, max_nbytes: int) -> Store | None:
        """A store that keeps at most about this many bytes; None: it has no cap."""
        del max_nbytes
        return None

    def make_broken(self) -> Store | None:
        """A store whose `open` must fail; None: there is none."""
        return None

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of one test. `fdasync.testing.SimLoop()` for a store that needs no outside world: it is faster,
        and finds what waits for ever at once."""
        import uvloop

        return uvloop.new_event_loop()

    @contextlib.asynccontextmanager
    async def on_store(self, store: Store | None = None) -> AsyncIterator[StoreBench]:
        """A bench around a store, a new one by default: opened, and closed at the end."""
        bench = StoreBench(store or self.make(), self)
        try:
            await bench.within(bench.store.open(bench.regions), "open")
            yield bench
        finally:
            await bench.close()


def skip(reason: str) -> NoReturn:
    """End this test as skipped."""
    import pytest

    pytest.skip(reason)


def on_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An async test method as a plain one, on a new loop of `new_loop`, ended at `limit_s`, leaving no task behind."""

    @functools.wraps(test)
    def run(self: S) -> None:
        run_bounded(self.new_loop(), test(self), self.limit_s)

    # pytest must see a plain function, whatever plugin looks for coroutines
    del run.__wrapped__
    return run


def run_bounded(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run to its end on a loop of its own, which is closed whatever hangs. Raises AssertionError at the limit."""
    task = loop.create_task(main, name="the test")
    try:
        loop.run_until_complete(asyncio.wait([task], timeout=limit_s))
        if not task.done():
            raise AssertionError(f"the test did not end within {limit_s:g} s: {_places(loop)}")
        result = task.result()
        loop.run_until_complete(turns(10))
        if asyncio.all_tasks(loop):
            raise AssertionError(f"tasks were left behind: {_places(loop)}")
        return result
    finally:
        end_loop(loop)


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left, wait for it for a while, close."""
    left = asyncio.all_tasks(loop)
    for each in left:
        each.cancel()
    # a deadlock in virtual time is what ended the test, not news
    with contextlib.suppress(RuntimeError):
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_AFTER_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    for each in left:
        _ = not each.done() or each.cancelled() or each.exception()
    loop.close()


async def turns(count: int) -> None:
    """So many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def _places(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        stack = task.get_stack(limit=1)
        where = f"{stack[-1].f_code.co_qualname} line {stack[-1].f_lineno}" if stack else "nowhere"
        lines.append(f"{task.get_name()} in {where}")
    return ", ".join(sorted(lines))


class StoreBench:
    """One store and the regions it was opened with.

    Attributes:
        store: the one under test.
        regions: three, of several MiB, touched only where parts are.
    """

    def __init__(self, store: Store, hooks: StoreHooks, seed: int = 0) -> None:
        self.store = store
        self.hooks = hooks
        self.regions = [SharedRegion.create(f"bench-{place}", size) for place, size in enumerate(_REGIONS_NBYTES)]
        self.random = Random(seed)
        self._used = [0] * len(self.regions)
        self._next = 0
        self.renew()

    def renew(self) -> None:
        """New keys from now on, and all room again."""
        self._prefix = f"t{uuid.uuid4().hex[:16]}"
        self.free()

    # -- keys, parts, bytes ---------------------------------------------------------------------------

    def key(self, name: object) -> str:
        """A key of this test and no other."""
        return f"{self._prefix}/{name}"

    def part(self, nbytes: int) -> Part:
        """New room in the next region, at an odd place, with guard bytes around it."""
        place = self._next
        self._next = (place + 1) % len(self.regions)
        offset = self._used[place] + _GUARD_NBYTES + 2 * self.random.randrange(30)
        part = Part(place, offset | 1, nbytes)
        stop = part.offset + nbytes + _GUARD_NBYTES
        self.regions[place].view(self._used[place], stop - self._used[place])[:] = bytes([_GUARD]) * (
            stop - self._used[place]
        )
        self._used[place] = stop
        return part

    def item(self, key: str, nbytes: int, pieces: int = 1) -> Item:
        """New parts for so many bytes, cut into pieces of any size from one byte up."""
        pieces = max(1, min(pieces, nbytes, self.store.capabilities.max_parts))
        cuts = [0, *sorted(self.random.sample(range(1, nbytes), pieces - 1)), nbytes]
        return Item(key, tuple(self.part(stop - start) for start, stop in pairwise(cuts)))

    def free(self) -> None:
        """All parts may be handed out again."""
        self._used = [0] * len(self.regions)

    def write(self, item: Item, data: bytes) -> Item:
        """Into its parts; the item, for chaining."""
        place = 0
        for part in item.parts:
            self.regions[part.region].view(part.offset, part.nbytes)[:] = data[place : place + part.nbytes]
            place += part.nbytes
        return item

    def read(self, item: Item) -> bytes:
        return b"".join(self.regions[part.region].view(part.offset, part.nbytes) for part in item.parts)

    def filled(self, key: str, data: bytes, pieces: int = 1) -> Item:
        """An item whose parts hold this."""
        return self.write(self.item(key, len(data), pieces), data)

    def scribble(self, items: Iterable[Item], byte: int = 0xEE) -> None:
        for item in items:
            self.write(item, bytes([byte]) * item.nbytes)

    def snapshot(self) -> list[bytearray]:
        """All that was handed out so far, guards included."""
        return [bytearray(region.view(0, used)) for region, used in zip(self.regions, self._used, strict=True)]

    def assert_only(self, before: list[bytearray], changed: Iterable[Item] = ()) -> None:
        """Since the snapshot nothing changed but the parts of these items."""
        now = [bytearray(region.view(0, len(was))) for region, was in zip(self.regions, before, strict=True)]
        for item in changed:
            for part in item.parts:
                stop = part.offset + part.nbytes
                before[part.region][part.offset : stop] = now[part.region][part.offset : stop]
        for place, (was, is_) in enumerate(zip(before, now, strict=True)):
            if was != is_:
                first = next(offset for offset, pair in enumerate(zip(was, is_, strict=True)) if pair[0] != pair[1])
                raise AssertionError(
                    f"byte {first} of region {place} was written, and belongs to no part of the call: "
                    f"it is {is_[first]:#04x} instead of {was[first]:#04x}"
                )

    # -- verbs, bounded and checked -------------------------------------------------------------------

    async def within(self, work: Awaitable[T], what: str) -> T:
        """Its result. Raises AssertionError if it takes longer than `verb_s`, or raises what no store may."""
        task = asyncio.ensure_future(work)
        await self.ended([task], what)
        return verb_result(task, what)

    async def ended(self, tasks: Sequence[asyncio.Future[Any]], what: str) -> None:
        """Wait for the ends. Raises AssertionError if they take longer than `verb_s`."""
        _, late = await asyncio.wait(tasks, timeout=self.hooks.verb_s)
        if late:
            raise AssertionError(f"{len(late)} of {len(tasks)} did not end within {self.hooks.verb_s:g} s: {what}")

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.within(self.store.put(items), "put")
        self._check(items, outcomes, ("done", "exists", "full", "failed"))
        return outcomes

    async def get(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.within(self.store.get_into(items), "get_into")
        self._check(items, outcomes, ("done", "miss", "damaged", "failed"))
        return outcomes

    async def exists(self, keys: Sequence[str]) -> int:
        return await self.within(self.store.exists_prefix(keys), "exists_prefix")

    async def delete(self, keys: Sequence[str]) -> int:
        return await self.within(self.store.delete(keys), "delete")

    async def keep(self, key: str, data: bytes, pieces: int = 1) -> Outcome:
        """Put these bytes."""
        (outcome,) = await self.put([self.filled(key, data, pieces)])
        return outcome

    async def fetch(self, key: str, nbytes: int, pieces: int = 1) -> bytes | str:
        """What is there: the bytes, or the status of a get that was not "done"."""
        item = self.item(key, nbytes, pieces)
        (outcome,) = await self.get([item])
        return self.read(item) if outcome.status == "done" else outcome.status

    async def assert_holds(self, key: str, data: bytes, pieces: int = 1) -> None:
        """These bytes are there; or nothing, where the store may forget."""
        found = await self.fetch(key, len(data), pieces)
        if not (self.hooks.may_forget and found == "miss"):
            equal(found, data, f"get of {key}")

    def _check(self, items: Sequence[Item], outcomes: list[Outcome], statuses: tuple[str, ...]) -> None:
        # whatever its type says
        answer: object = outcomes
        whole = isinstance(answer, list) and len(answer) == len(items)
        check(whole, f"a verb gives a list with an outcome for each of the {len(items)} items", outcomes)
        for outcome in outcomes:
            each: object = outcome
            fits = isinstance(each, Outcome) and each.status in statuses
            check(fits, f"an outcome of this verb is one of {', '.join(statuses)}", outcome)
            wrong = outcome.status in ("damaged", "full", "failed")
            check(bool(outcome.problem) == wrong, "an outcome says what is wrong, and only then", outcome)

    async def close(self) -> None:
        """Close the store, which must not hang, then the regions."""
        try:
            await self.within(self.store.aclose(), "aclose")
        finally:
            for region in self.regions:
                region.close()


def verb_result(task: asyncio.Future[T], what: str) -> T:
    """Of a verb that has ended. Raises what a store may raise, and AssertionError for all else."""
    try:
        return task.result()  # of a future that is done
    except (StoreUnavailable, StoreRejected):
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}, which no store may") from error


def value(tag: object, nbytes: int) -> bytes:
    """Bytes that only this tag has."""
    return Random(str(tag)).randbytes(nbytes)
