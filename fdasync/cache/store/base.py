"""The contract of a store, a place outside the engine that keeps sealed blocks; and `finish`, which helps to keep it.

`fdasync.testing.StoreTests` checks its sentences. Built in: `memory.py`, `file/store.py`; more by entry point
(`fdasync.stores`). It knows no engine. `fdasync/engine/store_io.py` calls stores through the guard of
`cache/store/guard/`.

**Objects.** A store maps keys to immutable strings of bytes. A key is text of `[0-9a-z./_-]`, at most
`capabilities.max_key_chars` long, never starting or ending with "/" or ".", without "..". It is no path: "a" and "a/b"
can both be keys, and nothing done to one touches the other. What the bytes mean is not the store's business:
`block_format.py` makes them self-describing and checks them.

**Parts.** A caller never hands over bytes. It names runs of bytes (`Part`) in shared regions that were given to
`open`; the value of an item is its parts one after the other, and a store reads and writes them in place, without
joining copies. A part may have no bytes, an item may not. The caller owns the regions, keeps them mapped until
`aclose` has returned, and does not touch a part between the call of a verb and its end, except that it may read what
a `put` reads.

**The end of a verb is the end of its use of the parts.** However a verb ends - it returns, raises or is cancelled -
the store neither reads nor writes the parts of that call any more, and keeps no reference to them. So a verb that is
cancelled stops early if it can, and else takes its time, and only then raises CancelledError; `finish` does that for
work that cannot be stopped. A caller that cannot wait has a deadline that stops the waiting only (`guard/`).

**Atomic.** An object is there whole or not at all, for every reader, in this process and after any crash: never in
part, never mixed with another. A put that failed, or was cancelled, leaves the object whole or absent.

**Immutable.** A put of a key that exists changes nothing, reads nothing it does not have to, and is "exists". Two
puts of one key at a time: one of them wins, whole. To replace an object, delete it first.

**Durable** to the degree `capabilities.durability` names, from the moment `put` said "done" for the item.

**May forget.** A store may drop objects whenever it likes (a cap, another owner's delete): a cache, not a database.

**Errors.** The failure of one item is its `Outcome`; a verb raises only for the call as a whole: StoreUnavailable
(transient: the same call may succeed later) or StoreRejected (permanent: the call breaks a limit or the contract). A
store checks the whole call before it begins: a call that it rejects has done nothing, not even for good items.
Any other error that a store raises is a defect of the store; the guard turns it into StoreUnavailable. A missing key
is never an error.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

from fdasync.ipc.remote import one_each, remote, some_of
from fdasync.ipc.shared_memory import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fdasync.ipc.shared_memory import SharedRegion

T = TypeVar("T")


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An object of a call.

    Attributes:
        key: its key in the store.
        parts: where its bytes are read from or written to, one part after the other; at least 1 byte in all.
    """

    key: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        # a list: this is asked for every item, more than once
        return sum([part.nbytes for part in self.parts])


Status = Literal["done", "exists", "miss", "damaged", "full", "failed"]


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one item of a call ended.

    Attributes:
        status: `put`: "done", "exists" (it was there: nothing changed), "full" (no room now; a later put may find
            some), "failed". `get_into`: "done" (all parts are filled), "miss", "damaged" (the object under this key
            cannot be the wanted one: it has another size, for example), "failed". Unless "done", the content of a get's
            parts is undefined.
        problem: in words, for "damaged", "full" and "failed"; else "".
        transient: the same item may succeed later; only with "failed".
    """

    status: Status
    problem: str = ""
    transient: bool = False

    @property
    def ok(self) -> bool:
        """There after a put; filled after a get."""
        return self.status in ("done", "exists")


DONE = Outcome("done")
EXISTS = Outcome("exists")
MISS = Outcome("miss")


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store promises, and its limits; valid once `open` returned.

    Attributes:
        name: for errors and metrics, e.g. "file".
        durability: what an object that is "done" outlives: "none" (not even this store object), "process" (any end of
            this process and of the engine), "machine" (loss of power).
        shared: other engines read the objects that are put here, and the other way round.
        max_batch: most items of one call.
        max_key_chars: most characters of a key.
        max_parts: most parts of an item.
        max_item_nbytes: most bytes of an item.
        capacity_nbytes: most bytes of all objects; None: the store does not know.
    """

    name: str
    durability: Literal["none", "process", "machine"]
    shared: bool = False
    max_batch: int = 256
    max_key_chars: int = 200
    max_parts: int = 32
    max_item_nbytes: int = 1 << 30
    capacity_nbytes: int | None = None


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds now.

    Attributes:
        objects: how many objects; None: the store cannot say.
        nbytes: their bytes; None: the store cannot say.
    """

    objects: int | None = None
    nbytes: int | None = None


#: bytes of an item: the offset of the first one in its value, and where they are, one view after the other
Piece = tuple[int, list[memoryview]]


class Arrival(Protocol):
    """An item's pieces on their way in, in the order in which they are to be filled.

    Each piece was filled when the next one is asked for, the last one when the end is. An iteration that is left before
    its end has no `problem`: the item failed.

    Attributes:
        problem: once every piece was filled: why these bytes are not the object that was asked for, or "".
    """

    problem: str

    def __iter__(self) -> Iterator[Piece]: ...


class Moves(ABC):
    """What the caller of a store does with the bytes of its items where they move, while the CPU's caches hold them.

    The pieces of an item are its value, each byte once. Both methods may be called in threads, several at a time, and
    raise nothing; nor does an iteration. The views lie in the item's parts.
    """

    @abstractmethod
    def leave(self, item: Item) -> Iterable[Piece]:
        """The pieces of an item that is put, in the order in which they are to be written. A piece has its final bytes
        when it is given, and keeps them."""

    @abstractmethod
    def arrive(self, item: Item) -> Arrival:
        """The pieces of an item that is read. If its `problem` is not "" in the end, the item is "damaged"."""

    def complete(self, item: Item) -> None:
        """Give an item that is put its final bytes: for a store that moves whole items."""
        for _ in self.leave(item):
            pass

    def judge(self, item: Item) -> str:
        """The problem of an item whose parts are filled, or "": for a store that moves whole items."""
        arrival = self.arrive(item)
        for _ in arrival:
            pass
        return arrival.problem


class PlainMoves(Moves):
    """Every item is one piece, as its parts lie.

    Args:
        views: the bytes of an item's parts.
    """

    def __init__(self, views: Callable[[Item], list[memoryview]]) -> None:
        self._views = views

    def leave(self, item: Item) -> Iterable[Piece]:
        return ((0, self._views(item)),)

    def arrive(self, item: Item) -> Arrival:
        return _PlainArrival(((0, self._views(item)),))


class _PlainArrival(tuple[Piece, ...]):
    """One piece on its way in."""

    problem = ""


class Store(ABC):
    """See the module. Life: `open` once, verbs any number of times and at the same time, `aclose` once or more.

    An `open` that raised or was cancelled may be called again: an engine starts without a store that cannot be reached,
    and tries again every so often. (A `blocking` store is a new object in a new process then.) A store is used from one
    loop.

    Attributes:
        config_type: the frozen msgspec Struct that the configuration is decoded into.
        blocking: its verbs may block, start threads or hold the GIL: it runs in a process of its own
            (`process/proxy.py`), never in an engine's.
        capabilities: its promises and limits.
        config: the decoded configuration.
        in_use: an engine has this object open; set by engines.
    """

    config_type: ClassVar[type[msgspec.Struct]]
    blocking: ClassVar[bool] = False
    capabilities: Capabilities
    in_use = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Connect, take locks, set `capabilities`. Later parts lie in these regions, which the caller owns.

        Raises StoreUnavailable (the store cannot be reached for now: a warning), StoreRejected (the configuration or
        the place is wrong, and the error names the way out: no engine starts with it). `aclose` is called after a
        failed `open` too.
        """

    @abstractmethod
    @remote(fits=some_of)
    async def exists_prefix(self, keys: Sequence[str]) -> int:
        """How many leading keys exist: the index of the first missing key, never a count of the existing ones.

        A hint: an object that exists now may be gone when it is read. Raises StoreUnavailable, StoreRejected.
        """

    @abstractmethod
    @remote(fits=one_each)
    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        """Fill the parts of each item; one outcome for each, in order. Raises StoreUnavailable, StoreRejected."""

    @abstractmethod
    @remote(fits=one_each)
    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        """Keep each item; one outcome for each, in order. Raises StoreUnavailable, StoreRejected."""

    @abstractmethod
    @remote(fits=some_of)
    async def delete(self, keys: Sequence[str]) -> int:
        """Drop objects; how many existed. A missing one is no error. Raises StoreUnavailable, StoreRejected."""

    @remote()
    async def usage(self) -> StoreUsage:
        """What it holds. Raises StoreUnavailable."""
        return StoreUsage()

    @abstractmethod
    async def aclose(self) -> None:
        """Let running verbs end, give everything back; idempotent, right after a failed `open` too.

        Verbs called from now on raise StoreUnavailable.
        """

    def beside(self, moves: Moves) -> bool:
        """Move the bytes of items piece by piece, as `moves` says; called once, before `open`. False, the default: this
        store does not, and moves parts as they come."""
        del moves
        return False

    async def kill(self, why: str) -> bool:
        """End every running verb now, whatever it does; True: none touches a buffer any more, and the store can be used
        further. False, the default: the store cannot do so (docs/design.md, rule 5)."""
        del why
        return False


async def finish(work: asyncio.Future[T]) -> T:
    """Wait for work that cannot be stopped and uses a caller's parts: a cancellation is raised after its end."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # no caller gets its result; retrieved, so that asyncio does not warn
        _ = work.cancelled() or work.exception()
        raise cancelled
    return work.result()  # of a future that is done
