"""The door: every request from the call until it is the scheduler's, and the names of those that are inside.

A bounded number of samples is live; who finds no place waits, higher priority first, within the request's own
deadline. An abort, the engine's end or its failure end a wait at the door as they end anything else. Knows
no schedule and no text. Called by `engine/engine.py` and `engine/stream.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.engine.output import RequestOutput
from fdasync.errors import (
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequestId,
    EngineBusy,
    EngineClosed,
    EngineFailed,
)
from fdasync.events.catalog import AbortRequested
from fdasync.ipc.deadlines import wait_within

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.inputs import Ask, Given
    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime
    from fdasync.events.catalog import RequestPrepared
    from fdasync.result import Result


class Intake:
    """A bounded number of live samples; who finds no place waits: higher priority first, then older."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._arrivals = 0
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, count: int, priority: int = 0) -> None:
        """Take `count` places. The caller's deadline bounds the wait; cancelling gives the place up."""
        first = not self._waiting or -priority < self._waiting[0][0]
        if first and self.used + count <= self.limit:
            self.used += count
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # arrivals differ, so futures are never compared
        entry = (-priority, self._arrivals, count, place)
        self._arrivals += 1
        insort(self._waiting, entry)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(count)
            else:
                # gone already where somebody left between the cancelling and now
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._grant()
            raise

    def enter_now(self, count: int) -> bool:
        """Take `count` places if nobody has to wait for them."""
        if self._waiting or self.used + count > self.limit:
            return False
        self.used += count
        return True

    def leave(self, count: int) -> None:
        self.used -= count
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][2] <= self.limit:
            _, _, count, place = self._waiting.pop(0)
            if not place.done():
                self.used += count
                place.set_result(None)


class Door:
    """Takes requests in and keeps their names.

    Args:
        check_open: raises unless the engine takes requests; True lets those finish that came before a drain.

    Attributes:
        failure_seen: some caller was told of the engine's failure.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        preparer: Preparer,
        rng: Random,
        check_open: Callable[[bool], None],
    ) -> None:
        self.failure_seen = False
        self._config = config
        self._runtime = runtime
        self._preparer = preparer
        self._rng = rng
        self._check_open = check_open
        self._intake = Intake(config.max_requests)
        self._live: dict[str, RequestOutput] = {}
        self._keys = itertools.count()

    @property
    def num_live(self) -> int:
        """Samples inside."""
        return self._intake.used

    @property
    def num_waiting(self) -> int:
        """Requests that wait to come in."""
        return self._intake.num_waiting

    def find(self, request_id: str) -> RequestOutput | None:
        return self._live.get(request_id)

    def requests(self) -> list[RequestOutput]:
        """All requests that have not ended, at the door or inside."""
        return list(self._live.values())

    async def submit(self, ask: Ask) -> RequestOutput:
        """Check, wait for a place, prepare, publish. Raises as `Engine.generate` says."""
        self._check_open(False)
        limit_s = self._config.request_deadline_s if ask.deadline_s is None else ask.deadline_s
        # what the caller may still change is copied here: it is checked once
        ask = self._preparer.check(ask, limit_s)
        name = f"{self._rng.getrandbits(64):016x}" if ask.request_id is None else ask.request_id
        if name in self._live:
            raise DuplicateRequestId(name)
        now = asyncio.get_running_loop().time()
        # of what another instance decodes nothing is read here
        here = ask.errand is None
        params = ask.params if here else msgspec.structs.replace(ask.params, stop=())
        request = RequestOutput(name, params, start=ask.start, now=now)
        self._live[name] = request
        # of an errand none are taken here; who aborts it gets as many as there are, which is none of each kind
        request.specs = wanted_specs(self._runtime.capacity.aux_specs, ask.routing, ask.aux)
        entered = False
        try:
            # bare deadline: the caller's own, who gets what there is
            async with asyncio.timeout_at(now + limit_s) as request.limit:
                await self._intake.enter(ask.params.n, ask.priority)
                entered = True
                self._check_open(True)
                keys = [next(self._keys) for _ in range(ask.params.n)]
                events = await self._preparer.prepare(ask, keys, rows=bool(request.specs), deadline=now + limit_s)
                request.asked = ask, events[0]
            if request.done.done():
                # aborted, or the engine closed, while it was being prepared
                self._forget(request, entered)
                return request
            self._check_open(True)
        except TimeoutError as error:
            aborted = request.done.done()
            if not aborted and not isinstance(error, DeadlineExceeded):
                self._runtime.hub.cut(request, "deadline")
            self._forget(request, entered)
            if not aborted and isinstance(error, DeadlineExceeded):
                raise
            return request
        except BaseException as error:
            self._forget(request, entered)
            if isinstance(error, EngineClosed):
                # the tokenizer's process closes when the engine does, and when it fails
                self._check_open(False)
            raise
        finally:
            request.limit = None
        request.prompt = events[0].tokens
        self._runtime.hub.add(request, keys, self._runtime.tokenizer)
        for event in events:
            self._runtime.bus.publish(event)
        return request

    def take_over(
        self, name: str, ask: Ask, given: Given, limit_s: float
    ) -> tuple[RequestOutput, list[RequestPrepared]]:
        """Take in a request that another instance prefills, without waiting. The caller publishes its events.

        Args:
            ask: as the other instance has it, its prompt tokenised.
            given: identities of its blocks, as the other instance knows them.
            limit_s: until its deadline, in seconds.

        Raises BadInput, DuplicateRequestId, EngineClosed, EngineFailed, and EngineBusy where there is no place.
        """
        self._check_open(False)
        ask = self._preparer.check(ask, limit_s)
        if name in self._live:
            raise DuplicateRequestId(name)
        count = ask.params.n
        if not self._intake.enter_now(count):
            raise EngineBusy(self._intake.used, self._intake.limit)
        now = asyncio.get_running_loop().time()
        request = RequestOutput(name, ask.params, start=ask.start, now=now)
        request.specs = wanted_specs(self._runtime.capacity.aux_specs, ask.routing, ask.aux)
        keys = [next(self._keys) for _ in range(count)]
        events = self._preparer.events(ask, ask.prompt, given, keys, rows=bool(request.specs), deadline=now + limit_s)
        request.asked = ask, events[0]
        request.prompt = events[0].tokens
        self._live[name] = request
        self._runtime.hub.add(request, keys, self._runtime.tokenizer)
        return request, events

    def abort(self, request: RequestOutput) -> None:
        """End it with what it has; where it is still at the door, with nothing. Ended ones stay as they are."""
        if request.done.done():
            return
        keys = [sample.key for sample in request.samples if sample.finish is None]
        if keys:
            self._runtime.bus.publish(AbortRequested(keys=tuple(keys)))
        elif not request.samples:
            self._runtime.hub.cut(request, "abort")
            if request.limit is not None and not request.limit.expired():
                # whatever it waits for at the door, it waits no longer
                request.limit.reschedule(0.0)

    def ended(self, request: RequestOutput) -> None:
        """Told by the output hub: the request has its result."""
        self._forget(request, entered=True)

    async def leave(self, request: RequestOutput) -> None:
        """Abort it if it has not ended, and wait until it has: one turn of the driver."""
        if request.done.done():
            return
        self.abort(request)
        limit_s = self._config.close_deadline_s
        done, _ = await wait_within([request.done], limit_s)
        if not done:
            raise DeadlineExceeded(f"aborting request {request.request_id}", limit_s)

    def result(self, request: RequestOutput) -> Result:
        """Of an ended request. Raises EngineFailed if the engine's failure ended it, DecodeFailed if its text could
        not be made; both carry what there is."""
        result = request.result(self._runtime.capacity)
        if request.failure is not None:
            self.failure_seen = True
            raise EngineFailed(request.failure, result)
        if request.spoiled is not None:
            raise DecodeFailed(request.spoiled, result)
        return result

    def _forget(self, request: RequestOutput, entered: bool) -> None:
        self._live.pop(request.request_id, None)
        if not request.done.done():
            # its caller has an error instead of a result; `drain` must not wait for it
            request.done.cancel()
        if entered:
            self._intake.leave(request.params.n)
