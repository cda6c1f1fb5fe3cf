"""A store around a store that changes nothing: the base class of the stores here that delay, fail or record.

Every verb goes through `around`, so a wrapper overrides one method, and every call to the store inside goes through
`ask`, which begins no call that a `kill` has ended. It knows the contract only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.events.catalog import StoreVerb
    from fdasync.ipc.shared_memory import SharedRegion

GIB = 1 << 30


class Wrapper(Store):
    """Delegates everything. It owns the store inside: it opens, kills and closes it.

    Attributes:
        inner: the store inside, not open yet when it is given.
        era: rises with every `kill` and `aclose`; a call of an earlier era begins no further call inside.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, inner: Store) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.era = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # a property for an attribute
        """The capabilities of the store inside."""
        return self.inner.capabilities

    @property
    def in_use(self) -> bool:
        """Whether an engine has the store inside open."""
        return self.inner.in_use

    @in_use.setter
    def in_use(self, in_use: bool) -> None:
        self.inner.in_use = in_use

    @property
    def name(self) -> str:
        """The name of the store inside, once it is open."""
        capabilities = getattr(self.inner, "capabilities", None)
        return capabilities.name if isinstance(capabilities, Capabilities) else type(self.inner).__name__

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        await self.inner.open(regions)

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
        """Kill the store inside; calls that wait in this wrapper end too."""
        self.end()
        return await self.inner.kill(why)

    async def aclose(self) -> None:
        """Close the store inside; calls that wait in this wrapper end too."""
        self._closed = True
        self.end()
        await self.inner.aclose()

    # -- for wrappers ---------------------------------------------------------------------------------

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        """Perform a verb of this store, by `ask`. `argument`: its keys or items; () for `usage`."""
        return await self.ask(verb, argument, self.era)

    async def ask(self, verb: StoreVerb, argument: Sequence[Any], era: int) -> Any:
        """Call the same verb of the store inside, for a call that began in this era. Raises StoreUnavailable if the era
        is over, and what the store raises."""
        self.check_era(era)
        call = getattr(self.inner, verb)
        return await (call() if verb == "usage" else call(argument))

    def check_era(self, era: int) -> None:
        """Raise StoreUnavailable for a call that a `kill` or `aclose` has ended."""
        if era != self.era:
            raise StoreUnavailable(self.name, "it is closed" if self._closed else "the call was ended")

    def end(self) -> None:
        """End the calls that wait in this wrapper: their era is over. `kill` and `aclose` call it."""
        self.era += 1

    async def _begin(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        if self._closed:
            raise StoreUnavailable(self.name, "it is closed")
        return await self.around(verb, argument)


def nbytes_of(verb: StoreVerb, argument: Sequence[Any]) -> int:
    """Bytes of all parts of a call."""
    return sum([part.nbytes for item in argument for part in item.parts]) if verb in ("get_into", "put") else 0
