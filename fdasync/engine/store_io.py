"""Performs what the scheduler asks of the store: lookups, fetches, writes; one event answers each.

Every operation is a task of its own, so that none waits for another. A deadline ends the waiting, not the work: what is
late keeps its blocks until it has really ended, and `LeaseReturned` says so. That every call ends is the wrappers'
doing: a late one that is older than `lease_kill_s` has the store's process killed (DECISIONS 5, `Timeout`). Rows of a
block that arrived are made to count before anybody hears of it. Decides nothing; knows identities as names, blocks as
places.

Called by `driver.py`. The store is wrapped (timeouts, breaker) and usually lives in another process; see
`store_stack.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.cache.store.base import Item
from fdasync.cache.store.block_format import object_key
from fdasync.engine.refusals import Refusals
from fdasync.errors import DeadlineExceeded, FdasyncError, StoreTimeout, TaskCancelled
from fdasync.events.catalog import (
    BlockDamaged,
    FetchEnded,
    LeaseReturned,
    LookedUp,
    LookupReturned,
    StoreEnded,
)
from fdasync.ipc.deadlines import Closing, wait_within
from fdasync.ipc.shared_memory import AUX_REGION, HOST_REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Outcome, Store
    from fdasync.events.actions import FetchBlocks, LookUp, StoreBlocks
    from fdasync.events.bus import EventBus

# what one call reads or writes at most: small enough that leading blocks arrive before the rest
_CALL_NBYTES = 16 << 20


class Keeper:
    """One engine's dealings with its store.

    Args:
        store: open; owned by the caller.
        host, arena: where KV and rows are; `arena` is None when capture is off.
        closing: the deadline of `aclose`, which others share.
        on_error: told of what no store may raise; it ends the engine.

    Attributes:
        refusals: what the store did not take, and why.
    """

    def __init__(
        self,
        bus: EventBus,
        store: Store,
        host: HostArena,
        arena: AuxArena | None,
        *,
        closing: Closing,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._host = host
        self._arena = arena
        self._closing = closing
        self._on_error = on_error
        self._waits: dict[asyncio.Task[None], None] = {}
        self._calls: dict[asyncio.Task[None], str] = {}
        self._closed = False
        self.refusals = Refusals()
        rows_nbytes = 0 if arena is None else sum(part.nbytes for part in arena.parts(0, AUX_REGION))
        self._item_nbytes = host.stride_nbytes + rows_nbytes

    def look_up(self, action: LookUp) -> None:
        """Start it; ends in `LookedUp`."""
        self._start(self._look_up(action), f"lookup {action.lookup_id}")

    def fetch(self, action: FetchBlocks) -> None:
        """Start it; ends in `FetchEnded`."""
        self._start(self._fetch(action), f"fetch {action.fetch_id}")

    def write(self, action: StoreBlocks) -> None:
        """Start it; ends in `StoreEnded`."""
        self._start(self._write(action), f"write {action.put_id}")

    async def aclose(self) -> None:
        """Nothing is waited for any more; calls that have not ended half-way to the deadline are killed with their
        process, or cancelled where the store has none.

        Raises DeadlineExceeded, naming what is stuck, where a store cannot let go of its blocks.
        """
        self._closed = True
        self._closing.begin()
        waits = list(self._waits)
        for wait in waits:
            wait.cancel()
        if waits:
            await wait_within(waits, self._closing.left_s)
        if self._calls:
            await wait_within(list(self._calls), self._closing.left_s / 2)
        if self._calls and await self._store.kill("the engine closes") and self._calls:
            await wait_within(list(self._calls), self._closing.left_s / 2)
        if self._calls:
            names = ", ".join(sorted(self._calls.values()))
            raise DeadlineExceeded(f"letting go of blocks in {names}", self._closing.limit_s)

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"fdasync {name}")
        self._waits[task] = None
        task.add_done_callback(self._ended)

    def _call(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A call to the store: it ends when the store has let go of the call's blocks, and is not cancelled."""
        task = asyncio.get_running_loop().create_task(work, name=f"fdasync {name}")
        self._calls[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        owes = task in self._waits
        self._waits.pop(task, None)
        self._calls.pop(task, "")
        if task.cancelled():
            if owes and not self._closed:
                # the event that it owes never comes
                self._on_error(TaskCancelled(task.get_name()))
        elif (error := task.exception()) is not None:
            self._on_error(error)

    # -- lookups --------------------------------------------------------------------------------------

    async def _look_up(self, action: LookUp) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        counts: list[int] = []
        asked = self._call(self._count(action, counts), f"lookup {action.lookup_id}")
        await wait_within([asked], action.deadline - started)
        # a lookup that is late holds nothing: what comes of it is nobody's
        count = counts[0] if counts else 0
        seconds = loop.time() - started
        answered = bool(counts)
        self._bus.publish(LookedUp(lookup_id=action.lookup_id, count=count, seconds=seconds, answered=answered))
        if not answered and not asked.done():
            # how slow it is must be known, or every lookup would be given up as early as this one
            await asyncio.wait([asked])
            if counts:
                self._bus.publish(LookupReturned(num_keys=len(action.keys), seconds=loop.time() - started))

    async def _count(self, action: LookUp, counts: list[int]) -> None:
        """Appends the count, or nothing where the store did not answer."""
        names = [object_key(action.namespace, key) for key in action.keys]
        most = self._store.capabilities.max_batch
        found = 0
        try:
            for first in range(0, len(names), most):
                batch = names[first : first + most]
                count = await self._store.exists_prefix(batch)
                found += count
                if count < len(batch):
                    break
        except FdasyncError:
            # trace and breaker have told of it; for a request it is a miss
            return
        counts.append(found)

    # -- fetches and writes -----------------------------------------------------------------------------

    async def _fetch(self, action: FetchBlocks) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        arrived = [False] * len(action.keys)
        calls = [
            self._call(self._get(action, batch, arrived), f"fetch {action.fetch_id}")
            for batch in self._batches(len(action.keys))
        ]
        _, late = await wait_within(calls, action.deadline - started)
        self._bus.publish(
            FetchEnded(
                fetch_id=action.fetch_id,
                arrived=tuple(arrived),
                late=bool(late),
                seconds=loop.time() - started,
                nbytes=sum(arrived) * self._item_nbytes,
            )
        )
        if late:
            await self._lease(late)
            self._bus.publish(LeaseReturned(lease_id=action.fetch_id, arrived=tuple(arrived)))

    async def _get(self, action: FetchBlocks, batch: range, arrived: list[bool]) -> None:
        items = [self._item(action, number) for number in batch]
        outcomes = await self._outcomes(self._store.get_into(items))
        for number, outcome in zip(batch, outcomes, strict=False):
            if outcome.status == "done":
                if self._arena is not None:
                    self._arena.adopt(action.slots[number], action.generations[number])
                arrived[number] = True
            elif outcome.status == "damaged":
                self._bus.publish(
                    BlockDamaged(
                        store=self._store.capabilities.name,
                        key=object_key(action.namespace, action.keys[number]),
                        problem=outcome.problem,
                    )
                )

    async def _write(self, action: StoreBlocks) -> None:
        if self._arena is not None:
            # rows that nobody asked for were not looked at yet
            for slot, generation in zip(action.slots, action.generations, strict=True):
                self._arena.check_written(slot, generation, 0, self._arena.block_tokens)
        loop = asyncio.get_running_loop()
        started = loop.time()
        stored = [False] * len(action.keys)
        timed_out: asyncio.Future[None] = loop.create_future()
        calls = [
            self._call(self._put(action, batch, stored, timed_out), f"write {action.put_id}")
            for batch in self._batches(len(action.keys))
        ]
        late: set[asyncio.Task[None]] = set(calls)
        while late and not timed_out.done():
            # the store's own timeout is the deadline
            await asyncio.wait([*late, timed_out], return_when=asyncio.FIRST_COMPLETED)
            late = {call for call in late if not call.done()}
        self._bus.publish(
            StoreEnded(
                put_id=action.put_id,
                stored=tuple(stored),
                late=bool(late),
                seconds=loop.time() - started,
                nbytes=sum(stored) * self._item_nbytes,
            )
        )
        if late:
            await self._lease(late)
            self._bus.publish(LeaseReturned(lease_id=action.put_id, arrived=tuple(stored)))

    async def _put(
        self, action: StoreBlocks, batch: range, stored: list[bool], timed_out: asyncio.Future[None]
    ) -> None:
        items = [self._item(action, number) for number in batch]
        outcomes = await self._outcomes(self._store.put(items), timed_out)
        for number, outcome in zip(batch, outcomes, strict=False):
            stored[number] = outcome.ok
        now = asyncio.get_running_loop().time()
        for event in self.refusals.add(self._store.capabilities.name, outcomes, now):
            self._bus.publish(event)

    async def _outcomes(
        self, call: Coroutine[None, None, list[Outcome]], timed_out: asyncio.Future[None] | None = None
    ) -> list[Outcome]:
        """What came of a call, none where it failed as a whole; on return the store touches no block of it."""
        try:
            return await call
        except StoreTimeout as error:
            if timed_out is not None and not timed_out.done():
                timed_out.set_result(None)
            ended = error.ended
            # as long as it takes: a call of a certain age is killed with its process
            await asyncio.wait([ended])
            outcomes: list[Outcome] = [] if ended.cancelled() or ended.exception() else ended.result()
            return outcomes
        except FdasyncError:
            # trace and breaker have told of it
            return []

    async def _lease(self, calls: set[asyncio.Task[None]]) -> None:
        """Until the store has let go, by itself or because a call grew too old and was killed with its process.

        Where a store in this process cannot be killed, its blocks stay out, and `aclose` names them.
        """
        await asyncio.wait(calls)

    def _item(self, action: FetchBlocks | StoreBlocks, number: int) -> Item:
        host = action.host[number]
        parts = [self._host.header(host, HOST_REGION), self._host.payload(host, HOST_REGION)]
        if self._arena is not None:
            parts += self._arena.parts(action.slots[number], AUX_REGION)
        return Item(object_key(action.namespace, action.keys[number]), tuple(parts))

    def _batches(self, count: int) -> list[range]:
        most = max(1, min(_CALL_NBYTES // self._item_nbytes, self._store.capabilities.max_batch))
        return [range(first, min(first + most, count)) for first in range(0, count, most)]
