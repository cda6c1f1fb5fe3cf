"""A weight update in parts, on its way to all instances of a router: its calls, taken one after the other.

The update is one task of the router (`control.py`), so that a caller who is cancelled leaves it whole. Knows no
instances. Made by `control.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.errors import BadInput, DeadlineExceeded, EngineClosed
from fdasync.ipc.deadlines import Within
from fdasync.ipc.futures import fail
from fdasync_fleet.verbs import name_of

if TYPE_CHECKING:
    from typing import Any

    from fdasync.errors import FdasyncError


class PartUpdate:
    """See the module.

    Attributes:
        begun: ends when all instances have begun, or with the error of the first that cannot.
        label: of the new weights, as a part named it; None: none has.
        parts: how many have come.
    """

    def __init__(self) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.label: str | None = None
        self.parts = 0
        self._calls: asyncio.Queue[tuple[Any, asyncio.Future[None]]] = asyncio.Queue()
        self._ended: FdasyncError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._ended is not None

    async def ask(self, verb: Any) -> None:
        """Have the task perform a verb, and wait for it. Raises its error; cancelling stops the waiting."""
        if self._ended is not None:
            raise self._ended
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((verb, answer))
        # bounded by the limits of the task, which answers each call, also at its end
        await asyncio.wait([answer])
        answer.result()  # of a future that is done

    async def next(self, limit_s: float) -> tuple[Any, asyncio.Future[None]]:
        """The next call. Raises DeadlineExceeded where none comes in time."""
        try:
            async with Within(limit_s):
                return await self._calls.get()
        except TimeoutError:
            raise DeadlineExceeded("the next part of an update", limit_s) from None

    def end(self, error: FdasyncError | None) -> None:
        """The task has ended: answer the calls that are left. A call to abandon the update has nothing to do."""
        self._ended = error or BadInput("end_weight_update", "no update is open", hint="it has ended")
        if not self.begun.done():
            fail(self.begun, error or EngineClosed("closed"))
        while not self._calls.empty():
            verb, answer = self._calls.get_nowait()
            if answer.done():
                continue
            if name_of(verb) == "abandon_update":
                answer.set_result(None)
            else:
                fail(answer, self._ended)
