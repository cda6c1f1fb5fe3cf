"""A store around a store that changes nothing: the base class of every wrapper.

Every verb goes through `around`, so a wrapper overrides one method, and every call to the store inside goes through
`ask`, which turns a breach of the contract into StoreUnavailable and begins no call that a `kill` has ended. It knows
the contract only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from fdasync.cache.store.base import Capabilities, Item, Outcome, Store, StoreUsage
from fdasync.errors import PLUGIN_ERRORS, FdasyncError, StoreRejected, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.events.catalog import StoreVerb
    from fdasync.ipc.shared_memory import SharedRegion

GIB = 1 << 30


class Wrapper(Store):
    """Delegates everything. It owns the store inside: it opens, kills and closes it.

    Args:
        inner: the store inside, not open yet.
        name: of the store in errors, before it is open too; "": its own, once it is open.

    Attributes:
        inner: the store inside.
        era: rises with every `kill` and `aclose`; a call of an earlier era begins no further call inside.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, inner: Store, *, name: str = "") -> None:
        super().__init__(inner.config)
        self.inner = inner
        self._given_name = name
        self.era = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The capabilities of the store inside."""
        return self.inner.capabilities

    @property
    def name(self) -> str:
        """The store's name in errors: the given one, or the store's own once it is open."""
        if self._given_name:
            return self._given_name
        capabilities = getattr(self.inner, "capabilities", None)
        return capabilities.name if isinstance(capabilities, Capabilities) else type(self.inner).__name__

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        """Open the store inside. An error that it should not raise becomes StoreUnavailable, as with verbs."""
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
        """Call the same verb of the store inside, for a call that began in this era.

        Raises StoreRejected, StoreUnavailable; the latter also if the era is over, and for an answer or an error that
        breaks the contract.
        """
        self.check_era(era)
        call = getattr(self.inner, verb)
        try:
            answer = await (call() if verb == "usage" else call(argument))
        except (StoreUnavailable, StoreRejected):
            raise
        except PLUGIN_ERRORS as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
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
        """End the calls that wait in this wrapper: their era is over. `kill` and `aclose` call it."""
        self.era += 1

    async def _begin(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        if self._closed:
            raise StoreUnavailable(self.name, "it is closed")
        return await self.around(verb, argument)


def nbytes_of(verb: StoreVerb, argument: Sequence[Any]) -> int:
    """Bytes of all parts of a call."""
    return sum([part.nbytes for item in argument for part in item.parts]) if verb in ("get_into", "put") else 0


def _fits(verb: StoreVerb, argument: Sequence[Any], answer: Any) -> bool:
    if verb == "usage":
        return isinstance(answer, StoreUsage)
    if verb in ("get_into", "put"):
        return isinstance(answer, list) and len(answer) == len(argument) and {*map(type, answer)} <= {Outcome}
    return isinstance(answer, int) and 0 <= answer <= len(argument)
