"""Performs the scheduler's store actions: lookups, fetches, writes. One event answers each.

Every operation is a task of its own, so that none waits for another. A deadline ends the waiting, not the work: a late
operation holds its blocks until it has really ended, and then publishes `LateTransferEnded`. The store's wrappers end
every call: `Timeout` has the store's process killed for a late call that is older than `store_kill_s` (docs/design.md,
rule 5). Rows of a fetched block are valid before the event that says so. Decides nothing; knows identities as names and
blocks as places. Called by `driver.py`; `store_stack.py` makes the store.
"""

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
    LateTransferEnded,
    LookedUp,
    LookupReturned,
    StoreEnded,
)
from fdasync.ipc.deadlines import Closing, wait_within
from fdasync.ipc.shared_memory import AUX_REGION, HOST_REGION, state_region

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Outcome, Store
    from fdasync.events.actions import FetchBlocks, LookUp, StoreBlocks
    from fdasync.events.bus import EventBus

# bytes of one call at most: leading blocks arrive before the rest
_CALL_NBYTES = 32 << 20


class StoreIO:
    """One engine's lookups, fetches and writes.

    Args:
        store: open; owned by the caller.
        host, arena, snapshots: where KV, rows and snapshots are; `arena` is None when capture is off, `snapshots` for
            a model without recurrent state.
        closing: the deadline of `aclose`, which other parts of the engine share.
        on_error: ends the engine with an error that no store may raise.

    Attributes:
        refusals: counts the blocks that the store refused.
    """

    def __init__(
        self,
        bus: EventBus,
        store: Store,
        host: HostArena,
        arena: AuxArena | None,
        snapshots: HostArena | None = None,
        *,
        closing: Closing,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._host = host
        self._arena = arena
        self._snapshots = snapshots
        self._closing = closing
        self._on_error = on_error
        self._waits: dict[asyncio.Task[None], None] = {}
        self._calls: dict[asyncio.Task[None], str] = {}
        self._closed = False
        self.refusals = Refusals()
        rows_nbytes = 0 if arena is None else sum(part.nbytes for part in arena.parts(0, AUX_REGION))
        self._item_nbytes = host.stride_nbytes + rows_nbytes
        self._state_region = state_region(with_rows=arena is not None)

    def look_up(self, action: LookUp) -> None:
        """Start the action; `LookedUp` answers it."""
        self._start(self._look_up(action), f"lookup {action.lookup_id}")

    def fetch(self, action: FetchBlocks) -> None:
        """Start the action; `FetchEnded` answers it."""
        self._start(self._fetch(action), f"fetch {action.fetch_id}")

    def write(self, action: StoreBlocks) -> None:
        """Start the action; `StoreEnded` answers it."""
        self._start(self._write(action), f"write {action.put_id}")

    async def aclose(self) -> None:
        """Stop waiting for operations, and let calls end for half of the time to the deadline. Then the store's process
        is killed, or calls are cancelled where it has none.

        Raises DeadlineExceeded, naming the calls, where a store does not let go of its blocks.
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
        """A call to the store as a task, which ends when the store has let go of its blocks and is never cancelled."""
        task = asyncio.get_running_loop().create_task(work, name=f"fdasync {name}")
        self._calls[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        owes_event = task in self._waits
        self._waits.pop(task, None)
        self._calls.pop(task, "")
        if task.cancelled():
            if owes_event and not self._closed:
                # its action would never be answered
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
        # a late lookup holds no blocks: its answer is dropped
        count = counts[0] if counts else 0
        seconds = loop.time() - started
        answered = bool(counts)
        self._bus.publish(LookedUp(lookup_id=action.lookup_id, count=count, seconds=seconds, answered=answered))
        if not answered and not asked.done():
            # its time must be known, or every lookup would be given up as early as this one
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
            # trace and breaker have published the error; for a request it is a miss
            return
        counts.append(found)

    # -- fetches and writes -----------------------------------------------------------------------------

    async def _fetch(self, action: FetchBlocks) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        arrived = [False] * len(action.keys)
        calls = [
            self._call(self._get(action, batch, arrived), f"fetch {action.fetch_id}") for batch in self._batches(action)
        ]
        _, late = await wait_within(calls, action.deadline - started)
        self._bus.publish(
            FetchEnded(
                fetch_id=action.fetch_id,
                arrived=tuple(arrived),
                late=bool(late),
                seconds=loop.time() - started,
                nbytes=self._nbytes(action, arrived),
            )
        )
        if late:
            # until the store lets go; of a store in this process, which cannot be killed, `aclose` names the calls
            await asyncio.wait(late)
            self._bus.publish(LateTransferEnded(transfer_id=action.fetch_id, arrived=tuple(arrived)))

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
            # rows that no request wanted were not checked yet
            for slot, generation in zip(action.slots, action.generations, strict=True):
                self._arena.check_written(slot, generation, 0, self._arena.block_tokens)
        loop = asyncio.get_running_loop()
        started = loop.time()
        stored = [False] * len(action.keys)
        timed_out: asyncio.Future[None] = loop.create_future()
        calls = [
            self._call(self._put(action, batch, stored, timed_out), f"write {action.put_id}")
            for batch in self._batches(action)
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
                nbytes=self._nbytes(action, stored),
            )
        )
        if late:
            # until the store lets go; of a store in this process, which cannot be killed, `aclose` names the calls
            await asyncio.wait(late)
            self._bus.publish(LateTransferEnded(transfer_id=action.put_id, arrived=tuple(stored)))

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
        """A call's outcomes, none where it failed as a whole; on return the store touches none of its blocks."""
        try:
            return await call
        except StoreTimeout as error:
            if timed_out is not None and not timed_out.done():
                timed_out.set_result(None)
            ended = error.ended
            # bounded: a call that is older than `store_kill_s` has the store's process killed
            await asyncio.wait([ended])
            outcomes: list[Outcome] = [] if ended.cancelled() or ended.exception() else ended.result()
            return outcomes
        except FdasyncError:
            # trace and breaker have published the error
            return []

    def _item(self, action: FetchBlocks | StoreBlocks, number: int) -> Item:
        host = action.host[number]
        parts = [self._host.header(host, HOST_REGION), self._host.payload(host, HOST_REGION)]
        if self._arena is not None:
            parts += self._arena.parts(action.slots[number], AUX_REGION)
        place = action.snapshots_host[number] if action.snapshots_host else -1
        if place >= 0:
            assert self._snapshots is not None
            parts.append(self._snapshots.payload(place, self._state_region))
        return Item(object_key(action.namespace, action.keys[number]), tuple(parts))

    def _sizes(self, action: FetchBlocks | StoreBlocks) -> list[int]:
        """Bytes of each block's object, about."""
        state_nbytes = 0 if self._snapshots is None else self._snapshots.stride_nbytes
        places = action.snapshots_host or (-1,) * len(action.keys)
        return [self._item_nbytes + (place >= 0) * state_nbytes for place in places]

    def _nbytes(self, action: FetchBlocks | StoreBlocks, moved: list[bool]) -> int:
        return sum(nbytes for nbytes, came in zip(self._sizes(action), moved, strict=True) if came)

    def _batches(self, action: FetchBlocks | StoreBlocks) -> list[range]:
        """Runs of blocks, one call each: as many blocks as fit into a call's bytes, and at least one."""
        most = self._store.capabilities.max_batch
        batches: list[range] = []
        first = nbytes = 0
        for number, item_nbytes in enumerate(self._sizes(action)):
            if number > first and (nbytes + item_nbytes > _CALL_NBYTES or number - first == most):
                batches.append(range(first, number))
                first, nbytes = number, 0
            nbytes += item_nbytes
        batches.append(range(first, len(action.keys)))
        return batches
