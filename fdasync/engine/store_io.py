"""Performs the scheduler's store actions: lookups, fetches, writes. One event answers each.

Every operation is a task of its own, so that none waits for another. A deadline ends the waiting, not the work: a late
operation holds its blocks until its calls have really ended, and then publishes `LateTransferEnded`. That they end is
the guard's affair (`cache/store/guard/`). Rows of a fetched block are valid before the event that says so. Decides
nothing; knows identities as names and blocks as places. Called by `driver.py`; `store_stack.py` makes the guarded
store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from fdasync.cache.store.base import Item
from fdasync.cache.store.block_format import object_key
from fdasync.cache.store.guard import waited
from fdasync.engine.refusals import Refusals
from fdasync.errors import TaskCancelled
from fdasync.events.catalog import (
    BlockDamaged,
    FetchEnded,
    LateTransferEnded,
    LookedUp,
    LookupReturned,
    StoreEnded,
)
from fdasync.ipc.shared_memory import AUX_REGION, HOST_REGION, state_region

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Outcome
    from fdasync.cache.store.guard import Call, GuardedStore
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
        on_error: ends the engine with an error that no store may raise.

    Attributes:
        refusals: counts the blocks that the store refused.
    """

    def __init__(
        self,
        bus: EventBus,
        store: GuardedStore,
        host: HostArena,
        arena: AuxArena | None,
        snapshots: HostArena | None = None,
        *,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._host = host
        self._arena = arena
        self._snapshots = snapshots
        self._on_error = on_error
        self._tasks: dict[asyncio.Task[None], None] = {}
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
        """Stop waiting for operations. Their calls hold their blocks until the store is closed."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            # each waits for calls alone
            await asyncio.wait(tasks)

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"fdasync {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task.cancelled():
            if not self._closed:
                # its action would never be answered
                self._on_error(TaskCancelled(task.get_name()))
        elif (error := task.exception()) is not None:
            self._on_error(error)

    # -- lookups --------------------------------------------------------------------------------------

    async def _look_up(self, action: LookUp) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        names = [object_key(action.namespace, key) for key in action.keys]
        most = self._store.capabilities.max_batch
        count = asked = 0
        # in turn: what stands behind a key that the store lacks is of no use
        for first in range(0, len(names), most):
            call = self._store.begin("exists_prefix", names[first : first + most])
            asked += len(call.argument)
            # a late lookup holds no blocks: its answer is dropped
            await waited([call], action.deadline)
            found = call.answer()
            count += found or 0
            if found != len(call.argument):
                break
        answered = found is not None
        seconds = loop.time() - started
        self._bus.publish(
            LookedUp(lookup_id=action.lookup_id, count=count if answered else 0, seconds=seconds, answered=answered)
        )
        if not call.ended.done():
            # its time must be known, or every lookup would be given up as early as this one
            await asyncio.wait([call.ended])
            if call.answer() is not None:
                self._bus.publish(LookupReturned(num_keys=asked, seconds=loop.time() - started))

    # -- fetches and writes -----------------------------------------------------------------------------

    async def _fetch(self, action: FetchBlocks) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        arrived = [False] * len(action.keys)
        calls = self._begin("get_into", action)
        await waited(calls, action.deadline)
        self._take_fetched(action, calls, arrived)
        self._bus.publish(
            FetchEnded(
                fetch_id=action.fetch_id,
                arrived=tuple(arrived),
                late=bool(calls),
                seconds=loop.time() - started,
                nbytes=self._nbytes(action, arrived),
            )
        )
        if calls:
            await asyncio.wait([call.ended for call in calls])
            self._take_fetched(action, calls, arrived)
            self._bus.publish(LateTransferEnded(transfer_id=action.fetch_id, arrived=tuple(arrived)))

    def _take_fetched(self, action: FetchBlocks, calls: dict[Call, range], arrived: list[bool]) -> None:
        for number, outcome in _take_ended(calls):
            if outcome.status == "done":
                if self._arena is not None:
                    self._arena.adopt(action.slots[number], action.generations[number])
                arrived[number] = True
            elif outcome.status == "damaged":
                key = object_key(action.namespace, action.keys[number])
                self._bus.publish(BlockDamaged(store=self._store.name, key=key, problem=outcome.problem))

    async def _write(self, action: StoreBlocks) -> None:
        if self._arena is not None:
            # rows that no request wanted were not checked yet
            for slot, generation in zip(action.slots, action.generations, strict=True):
                self._arena.check_written(slot, generation, 0, self._arena.block_tokens)
        loop = asyncio.get_running_loop()
        started = loop.time()
        stored = [False] * len(action.keys)
        calls = self._begin("put", action)
        # the guard's deadline is the deadline
        await waited(calls)
        self._take_written(calls, stored)
        self._bus.publish(
            StoreEnded(
                put_id=action.put_id,
                stored=tuple(stored),
                late=bool(calls),
                seconds=loop.time() - started,
                nbytes=self._nbytes(action, stored),
            )
        )
        if calls:
            await asyncio.wait([call.ended for call in calls])
            self._take_written(calls, stored)
            self._bus.publish(LateTransferEnded(transfer_id=action.put_id, arrived=tuple(stored)))

    def _take_written(self, calls: dict[Call, range], stored: list[bool]) -> None:
        outcomes = dict(_take_ended(calls))
        for number, outcome in outcomes.items():
            stored[number] = outcome.ok
        now = asyncio.get_running_loop().time()
        for event in self.refusals.add(self._store.name, outcomes.values(), now):
            self._bus.publish(event)

    # -- calls ----------------------------------------------------------------------------------------

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

    def _begin(self, verb: Literal["get_into", "put"], action: FetchBlocks | StoreBlocks) -> dict[Call, range]:
        """Ask for a verb of all blocks; which blocks each call has."""
        return {
            self._store.begin(verb, [self._item(action, number) for number in batch]): batch
            for batch in self._batches(action)
        }

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


def _take_ended(calls: dict[Call, range]) -> Iterator[tuple[int, Outcome]]:
    """Take the calls that have ended out of `calls`; blocks and their outcomes, none where a call failed as a whole."""
    for call in [call for call in calls if call.ended.done()]:
        yield from zip(calls.pop(call), call.answer() or (), strict=False)
