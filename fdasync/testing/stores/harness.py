"""One open store for each conformance test: items in guarded memory, keys of the test's own, every wait bounded.

Keys are new in every test, so that a store may keep what other tests put. Knows the contract (`store/base.py`) only.
Used by `stores/suite.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from fdasync.cache.store.base import Item
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing.harness.bounded import LoopHooks
from fdasync.testing.harness.guarded_memory import GuardedMemory, all_ended, check_outcomes
from fdasync.testing.harness.verdicts import equal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence

    from fdasync.cache.store.base import Outcome, Store
    from fdasync.ipc.shared_memory import Part

# the first is large enough that few parts of it break a usual limit; pages that are not touched cost nothing
_REGIONS_NBYTES = (34 << 20, (16 << 20) + 4096, (8 << 20) + 12)

T = TypeVar("T")


class StoreHooks(LoopHooks):
    """What an adopter of `StoreTests` says about its store.

    Attributes:
        may_forget: the store drops objects unasked in these tests (a tiny cap, a lossy store): a miss is then no error,
            wrong bytes still are.
        tells_races: of two puts of one key at a time, or in one call, exactly one ends "done". False for a store
            whose service cannot tell.
        verb_s: how long one verb may take, in seconds. It bounds hangs alone: busy machines are slow.
        slow_to_open: opening takes a process or a server: the state machine opens one store for all of its runs.
        examples: runs of the state machine.
        steps: of each run.
    """

    may_forget = False
    tells_races = True
    verb_s = 120.0
    slow_to_open = False
    examples = 15
    steps = 25

    def make(self) -> Store:
        """A store, not opened. Called again only when the last one is closed, so all may use one place."""
        raise NotImplementedError

    def again(self, closed: Store) -> Store | None:
        """A new store object, not opened, on the place of a closed one; None: objects do not outlive their store."""
        del closed
        return None

    def make_capped(self, max_nbytes: int) -> Store | None:
        """A store that keeps at most about this many bytes; None: it has no cap."""
        del max_nbytes
        return None

    def make_broken(self) -> Store | None:
        """A store whose `open` must fail; None: every `open` works."""
        return None

    @contextlib.asynccontextmanager
    async def on_store(self, store: Store | None = None) -> AsyncIterator[StoreBench]:
        """A bench around a store, a new one by default: opened, and closed at the end."""
        bench = StoreBench(store or self.make(), self)
        try:
            await bench.within(bench.store.open(bench.regions), "open")
            yield bench
        finally:
            await bench.close()


class StoreBench(GuardedMemory):
    """One store and the regions it was opened with.

    Attributes:
        store: the one under test.
        hooks: what its adopter says about it.
    """

    def __init__(self, store: Store, hooks: StoreHooks, seed: int = 0) -> None:
        super().__init__("bench", _REGIONS_NBYTES, seed)
        self.store = store
        self.hooks = hooks
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
        """Room in the next region."""
        place = self._next
        self._next = (place + 1) % len(self.regions)
        return self.room(nbytes, place)

    def item(self, key: str, nbytes: int, pieces: int = 1) -> Item:
        """New parts for so many bytes, cut into pieces of any size from one byte up."""
        pieces = max(1, min(pieces, nbytes, self.store.capabilities.max_parts))
        cuts = [0, *sorted(self.random.sample(range(1, nbytes), pieces - 1)), nbytes]
        return Item(key, tuple(self.part(stop - start) for start, stop in pairwise(cuts)))

    def write(self, item: Item, data: bytes) -> Item:
        """Write these bytes into the item's parts; returns the item."""
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

    def assert_only(self, before: list[bytearray], changed: Iterable[Item] = ()) -> None:
        """Since the snapshot nothing changed but the parts of these items."""
        self.assert_unchanged(before, [part for item in changed for part in item.parts])

    # -- verbs, bounded and checked -------------------------------------------------------------------

    async def within(self, work: Awaitable[T], what: str) -> T:
        """Its result. Raises AssertionError if it takes longer than `verb_s`, or raises what no store may."""
        task = asyncio.ensure_future(work)
        await self.ended([task], what)
        return verb_result(task, what)

    async def ended(self, tasks: Sequence[asyncio.Future[T]], what: str) -> None:
        """Wait for the ends. Raises AssertionError if they take longer than `verb_s`."""
        await all_ended(tasks, self.hooks.verb_s, what)

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.within(self.store.put(items), "put")
        check_outcomes(outcomes, len(items), ("done", "exists", "full", "failed"), "items")
        return outcomes

    async def get(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = await self.within(self.store.get_into(items), "get_into")
        check_outcomes(outcomes, len(items), ("done", "miss", "damaged", "failed"), "items")
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
        """The bytes under a key, or the status of a get that was not "done"."""
        item = self.item(key, nbytes, pieces)
        (outcome,) = await self.get([item])
        return self.read(item) if outcome.status == "done" else outcome.status

    async def assert_holds(self, key: str, data: bytes, pieces: int = 1) -> None:
        """Raise AssertionError unless the key holds these bytes, or nothing where the store may forget."""
        found = await self.fetch(key, len(data), pieces)
        if not (self.hooks.may_forget and found == "miss"):
            equal(found, data, f"get of {key}")

    async def close(self) -> None:
        """Close the store, which must not hang, then the regions."""
        try:
            await self.within(self.store.aclose(), "aclose")
        finally:
            self.close_regions()


def verb_result(task: asyncio.Future[T], what: str) -> T:
    """The result of a verb that has ended. Raises what a store may raise, and AssertionError for all else."""
    try:
        return task.result()  # of a future that is done
    except (StoreUnavailable, StoreRejected):
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}, which no store may") from error
