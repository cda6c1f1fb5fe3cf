"""A store around a store that changes nothing; what every wrapper starts from.

Every verb goes through `around`, so a wrapper overrides one method, and every call to the store inside goes through
`ask`, which turns what breaks the contract into StoreUnavailable and lets no call begin that a `kill` has ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.errors import FdasyncError, StoreRejected, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import SharedRegion

Verb = Literal["exists_prefix", "get_into", "put", "delete", "usage"]

GIB = 1 << 30


class Wrapper(Store):
    """Delegates everything: the store inside belongs to it, and is opened, killed and closed by it.

    Args:
        inner: the store inside, not open yet.
        name: of the store, for errors before it is open too; "": its own, once it has told it.

    Attributes:
        inner: the store inside.
        era: rises with every `kill` and `aclose`; what a call of an earlier era has not begun yet, it never begins.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, inner: Store, *, name: str = "") -> None:
        super().__init__(inner.config)
        self.inner = inner
        self._given_name = name
        self.era = 0
        self.naps = Naps()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the store inside."""
        return self.inner.capabilities

    @property
    def name(self) -> str:
        """For errors: the given name, or the store's own once it is open."""
        if self._given_name:
            return self._given_name
        capabilities = getattr(self.inner, "capabilities", None)
        return capabilities.name if isinstance(capabilities, Capabilities) else type(self.inner).__name__

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """The inner store's. What it should not raise is StoreUnavailable, as with verbs."""
        try:
            await self.inner.open(regions)
        except FdasyncError:
            raise
        except Exception as error:
            raise StoreUnavailable(self.name, f"open broke the contract: {type(error).__name__}: {error}") from error

    async def exists_prefix(self, keys: Sequence[str]) -> int:
        return cast("int", await self._begin("exists_prefix", keys))

    async def get_into(self, items: Sequence[Item]) -> list[Outcome]:
        return cast("list[Outcome]", await self._begin("get_into", items))

    async def put(self, items: Sequence[Item]) -> list[Outcome]:
        return cast("list[Outcome]", await self._begin("put", items))

    async def delete(self, keys: Sequence[str]) -> int:
        return cast("int", await self._begin("delete", keys))

    async def usage(self) -> StoreUsage:
        return cast("StoreUsage", await self._begin("usage", ()))

    async def kill(self, why: str) -> bool:
        """The inner store's; calls that wait in a wrapper end too."""
        self.end()
        return await self.inner.kill(why)

    async def aclose(self) -> None:
        """The inner store's; calls that wait in a wrapper end too."""
        self._closed = True
        self.end()
        await self.inner.aclose()

    # -- for wrappers ---------------------------------------------------------------------------------

    async def around(self, verb: Verb, argument: Sequence[Any]) -> Any:
        """A verb of this store: ask the inner one, with something around it. `argument`: keys, items, or () (usage)."""
        return await self.ask(verb, argument, self.era)

    async def ask(self, verb: Verb, argument: Sequence[Any], era: int) -> Any:
        """The same verb of the store inside, for a call that began in this era.

        Raises StoreUnavailable, also if the era is over and for an answer or an error that breaks the contract;
        StoreRejected.
        """
        self.check_era(era)
        call = getattr(self.inner, verb)
        try:
            answer = await (call() if verb == "usage" else call(argument))
        except (StoreUnavailable, StoreRejected):
            raise
        except Exception as error:
            problem = f"{verb} broke the contract: {type(error).__name__}: {error}"
            raise StoreUnavailable(self.name, problem) from error
        if not _fits(verb, argument, answer):
            raise StoreUnavailable(self.name, f"{verb} broke the contract: it answered {answer!r:.200}")
        return answer

    def check_era(self, era: int) -> None:
        """Raise StoreUnavailable for a call that a `kill` or `aclose` has ended."""
        if era != self.era:
            raise StoreUnavailable(self.name, "it is closed" if self._closed else "the call was ended")

    def end(self) -> None:
        """End what waits in this wrapper; it then finds its era over. Called by `kill` and `aclose`."""
        self.era += 1
        self.naps.end()

    async def _begin(self, verb: Verb, argument: Sequence[Any]) -> Any:
        if self._closed:
            raise StoreUnavailable(self.name, "it is closed")
        return await self.around(verb, argument)


class Naps:
    """Waits of known length, all of which can be ended at once."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    def begin(self) -> asyncio.Future[None]:
        """One without a length: it ends with `end`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    async def nap(self, seconds: float) -> None:
        future = self.begin()
        # bare timer: a pause, which nobody answers
        timer = future.get_loop().call_later(seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def end(self) -> None:
        for future in list(self._futures):
            _wake(future)


def nbytes_of(verb: Verb, argument: Sequence[Any]) -> int:
    """Bytes of all parts of a call."""
    return sum(item.nbytes for item in argument) if verb in ("get_into", "put") else 0


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fits(verb: Verb, argument: Sequence[Any], answer: Any) -> bool:
    if verb == "usage":
        return isinstance(answer, StoreUsage)
    if verb in ("get_into", "put"):
        whole = isinstance(answer, list) and len(answer) == len(argument)
        return whole and all(isinstance(outcome, Outcome) for outcome in answer)
    return isinstance(answer, int) and 0 <= answer <= len(argument)
