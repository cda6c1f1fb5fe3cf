"""What a store answered: whether the contract allows it, and the event that tells of it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fdasync.cache.store.base import Outcome, StoreUsage
from fdasync.events.catalog import StoreCalled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.guard.call import Call
    from fdasync.events.catalog import StoreVerb


def fits(verb: str, argument: Sequence[Any], answer: object) -> bool:
    """Whether a verb may answer this."""
    if verb == "usage":
        return isinstance(answer, StoreUsage)
    if verb in ("get_into", "put"):
        return isinstance(answer, list) and len(answer) == len(argument) and {*map(type, answer)} <= {Outcome}
    return isinstance(answer, int) and 0 <= answer <= len(argument)


def told_of(store: str, call: Call, error: BaseException | None, answer: Any) -> StoreCalled:
    """The event that tells how the wait for a call ended: by an error, a deadline, or an answer."""
    verb, count, seconds = cast("StoreVerb", call.verb), len(call.argument), asyncio.get_running_loop().time()
    called = partial(StoreCalled, store=store, verb=verb, items=count, seconds=seconds - call.asked_at)
    if error is not None or verb == "usage":
        return called(nbytes=0, error="" if error is None else type(error).__name__)
    if isinstance(answer, int):
        return called(nbytes=0, done=answer, missed=count - answer)
    many = [outcome.status for outcome in answer].count
    moved = sum([item.nbytes for item, one in zip(call.argument, answer, strict=True) if one.status == "done"])
    return called(
        nbytes=moved,
        done=many("done") + many("exists"),
        missed=many("miss"),
        damaged=many("damaged"),
        failed=many("failed") + many("full"),
    )
