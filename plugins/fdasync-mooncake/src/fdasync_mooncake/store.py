"""The store: the contract of `fdasync.cache.store` on a Mooncake pool.

Runs in a process of its own (`blocking`), because the client blocks, holds the GIL and starts threads. Verbs run in
threads there (`client.py`), on the caller's memory, without a copy. One thread moves bytes by default, because
transfers at the same time take the CPU from each other; calls that ask the master, hash or check run beside it. Knows
keys, parts and regions; `client.py` knows the client's codes.

All users of the master share the pool: objects come and go, are evicted, and are lost with the machine that lent their
memory, or with the master. So a key may be a miss right after it was put.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from concurrent.futures import Future, ThreadPoolExecutor  # threads: in the store's process, in no engine process
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.cache.store import DONE, EXISTS, Capabilities, Item, Moves, Outcome, Store, StoreUsage, finish
from fdasync.cache.store.validation import check_items, check_keys
from fdasync.errors import StoreUnavailable
from fdasync_mooncake.client import Client, Value
from fdasync_mooncake.config import NAME, MooncakeConfig, check_config, parse_address
from fdasync_mooncake.gate import KeyGate
from fdasync_mooncake.usage import PoolUsage, read_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fdasync.ipc.shared_memory import SharedRegion

T = TypeVar("T")

_MAX_BATCH = 256
_MAX_KEY_CHARS = 400
_MAX_PARTS = 128
# while one hashes 16 MiB or waits for the metrics server, a lookup runs in the other
_LOOKUP_THREADS = 2


class _Threads:
    """Threads of blocking calls.

    Attributes:
        transfers: of calls that move bytes.
        lookups: of calls that ask the master, hash or check.
    """

    def __init__(self, transfers: int) -> None:
        self.transfers = ThreadPoolExecutor(transfers, f"{NAME}-transfers")  # threads: in the store's process
        self.lookups = ThreadPoolExecutor(_LOOKUP_THREADS, f"{NAME}-lookups")  # threads: in the store's process


class MooncakeStore(Store):
    """See the module. Use it in a process of its own only: a call that hangs ends with its process (`client.py`)."""

    config_type = MooncakeConfig
    blocking = True
    config: MooncakeConfig

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(config)
        self.capabilities = self._capabilities(None)
        self._client = Client(config)
        self._opened = False
        self._regions: tuple[SharedRegion, ...] = ()
        self._bases: list[int] = []
        self._gate = KeyGate()
        self._threads: _Threads | None = None
        self._moves: Moves | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._closing: asyncio.Future[None] | None = None

    def _capabilities(self, capacity_nbytes: int | None) -> Capabilities:
        return Capabilities(
            name=NAME,
            # memory that this process lends ends with it; without that, objects are in other processes' memory
            durability="none" if self.config.segment_nbytes else "process",
            shared=True,
            max_batch=_MAX_BATCH,
            max_key_chars=_MAX_KEY_CHARS,
            max_parts=_MAX_PARTS,
            capacity_nbytes=capacity_nbytes,
        )

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        check_config(self.config)
        self._regions = tuple(regions)
        # the regions stay mapped until `aclose` has returned, so their addresses stay too
        self._bases = [ctypes.addressof(ctypes.c_char.from_buffer(region.map)) for region in regions]
        self._threads = _Threads(self.config.threads)
        await self._run(self._threads.lookups, self._join)
        if self.config.metrics:
            self.capabilities = self._capabilities((await self._pool_usage()).capacity_nbytes)
        self._opened = True

    def beside(self, moves: Moves) -> bool:
        self._moves = moves
        return True

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        client = self._ready()
        check_keys(keys, self.capabilities)
        names = [self._name(key) for key in keys]
        there = await self._run(self._pools.lookups, lambda: client.exists(names)) if names else []
        return [*there, False].index(False)

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        client = self._ready()
        check_items(items, self.capabilities, self._regions)
        values = [self._value(item) for item in items]
        if not values:
            return []
        with self._verb():
            async with self._gate.reading(value.key for value in values):
                outcomes = await self._run(self._pools.transfers, lambda: client.get(values))
            # beside the next call's transfer
            return await self._run(self._pools.lookups, lambda: [*map(self._judged, items, outcomes)])

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        client = self._ready()
        check_items(items, self.capabilities, self._regions)
        values = [self._value(item) for item in items]
        if not values:
            return []

        def prepare() -> list[int]:
            places = client.absent(values)
            if self._moves is not None:
                for place in places:
                    self._moves.complete(items[place])
            return places

        with self._verb():
            async with self._gate.writing(value.key for value in values):
                # beside another call's transfer
                places = await self._run(self._pools.lookups, prepare)
                fresh = [values[place] for place in places]
                done = await self._run(self._pools.transfers, lambda: client.put(fresh)) if fresh else []
        outcomes = dict(zip(places, done, strict=True))
        # the second item of a key finds the object of the first, unless its put failed
        first = {value.key: outcome for value, outcome in zip(fresh, done, strict=True) if outcome is not DONE}
        return [outcomes.get(place) or first.get(value.key, EXISTS) for place, value in enumerate(values)]

    async def delete(self, keys: Sequence[str]) -> int:
        client = self._ready()
        check_keys(keys, self.capabilities)
        names = [self._name(key) for key in dict.fromkeys(keys)]
        if not names:
            return 0
        with self._verb():
            async with self._gate.writing(names):
                return await self._run(self._pools.lookups, lambda: client.remove(names))

    async def usage(self) -> StoreUsage:
        self._ready()
        if not self.config.metrics:
            return StoreUsage()
        pool = await self._pool_usage()
        return StoreUsage(objects=pool.objects, nbytes=pool.nbytes)

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        threads, self._threads = self._threads, None
        if threads is None:
            return
        try:
            await asyncio.wrap_future(threads.lookups.submit(self._client.close))
        finally:
            threads.lookups.shutdown(wait=False)
            threads.transfers.shutdown(wait=False)
            self._regions = ()

    def _join(self) -> None:
        self._client.connect()
        for base, region in zip(self._bases, self._regions, strict=True):
            self._client.register(base, region.nbytes)

    def _ready(self) -> Client:
        if self._closing is not None or not self._opened:
            raise StoreUnavailable(NAME, "it is closed" if self._closing is not None else "it was not opened")
        return self._client

    @property
    def _pools(self) -> _Threads:
        if self._threads is None:
            raise StoreUnavailable(NAME, "it is closed")
        return self._threads

    @contextlib.contextmanager
    def _verb(self) -> Iterator[None]:
        """Around a verb of several calls: `aclose` waits for its end."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(ended)
        try:
            yield
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Do `work` in a thread. A cancelled call drops work that has not begun, and waits for work that has."""
        submitted: Future[T] = pool.submit(work)
        done = asyncio.wrap_future(submitted)
        self._running.add(done)
        done.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not submitted.cancel():
                with contextlib.suppress(Exception):
                    await finish(done)
            raise

    def _judged(self, item: Item, outcome: Outcome) -> Outcome:
        """The outcome of a read after the check of the block format."""
        problem = self._moves.judge(item) if outcome is DONE and self._moves is not None else ""
        return Outcome("damaged", problem) if problem else outcome

    async def _pool_usage(self) -> PoolUsage:
        host, port = parse_address("metrics", self.config.metrics)
        return await self._run(self._pools.lookups, lambda: read_usage(host, port, self.config.rpc_timeout_s))

    def _name(self, key: str) -> str:
        return f"{self.config.prefix}/{key}"

    def _value(self, item: Item) -> Value:
        parts = [part for part in item.parts if part.nbytes]
        return Value(
            key=self._name(item.key),
            addresses=[self._bases[part.region] + part.offset for part in parts],
            sizes=[part.nbytes for part in parts],
            nbytes=item.nbytes,
        )
