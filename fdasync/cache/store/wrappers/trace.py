"""Reports the time and the outcomes of every call: metrics and logs are made of the reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.wrappers.base import Wrapper, nbytes_of
from fdasync.events.catalog import StoreVerb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.store.base import Store


class StoreCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a store, after its end.

    Attributes:
        store: its name.
        verb: the verb that was called.
        items: how many items or keys the call had.
        nbytes: bytes of all its parts.
        done_nbytes: bytes of the items that were "done": those really read or written.
        seconds: from the call to its end, or to the end of the waiting for it.
        outcomes: how many items ended with each status; of `exists_prefix` "exists" and "miss", of `delete` "done" and
            "miss".
        error: type and words of the error that the call raised; "" if it returned.
    """

    store: str
    verb: StoreVerb
    items: int
    nbytes: int
    done_nbytes: int
    seconds: float
    outcomes: dict[str, int]
    error: str


class Trace(Wrapper):
    """Calls `on_call` at the end of each call, in the loop; it must return soon and not raise."""

    def __init__(self, inner: Store, on_call: Callable[[StoreCall], None]) -> None:
        super().__init__(inner)
        self._on_call = on_call

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        answer: Any = None
        problem = ""
        try:
            answer = await self.ask(verb, argument, self.era)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            outcomes, done_nbytes = _count(verb, argument, answer)
            self._on_call(
                StoreCall(
                    store=self.name,
                    verb=verb,
                    items=len(argument),
                    nbytes=nbytes_of(verb, argument),
                    done_nbytes=done_nbytes,
                    seconds=loop.time() - begun_at,
                    outcomes=outcomes,
                    error=problem,
                )
            )
        return answer


def _count(verb: StoreVerb, argument: Sequence[Any], answer: Any) -> tuple[dict[str, int], int]:
    if answer is None or verb == "usage":
        return {}, 0
    if verb in ("get_into", "put"):
        statuses = [outcome.status for outcome in answer]
        done = [item for item, status in zip(argument, statuses, strict=True) if status == "done"]
        return dict(Counter(statuses)), nbytes_of(verb, done)
    there = "exists" if verb == "exists_prefix" else "done"
    return {status: count for status, count in ((there, answer), ("miss", len(argument) - answer)) if count}, 0
