"""The frontend: takes a request from the call to the scheduler, and keeps the names of live requests.

A bounded number of samples is live. A request that finds no place waits, in the policy's order, within its own
deadline; an abort, the engine's end or its failure end that wait too. Knows no schedule and no text. Called by
`engine/engine.py`, `engine/stream.py` and, for requests of other instances, `fdasync_fleet/instance`.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.engine.chosen_output import chosen_nbytes, make_chosen
from fdasync.engine.request_state import RequestState
from fdasync.errors import (
    BuffersOut,
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequestId,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    GrammarFailed,
    ProcessorFailed,
)
from fdasync.events.catalog import AbortRequested
from fdasync.ipc.deadlines import wait_within
from fdasync.scheduler import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from fdasync.cache.identity import PromptHashes
    from fdasync.engine.chosen_output import ChosenOutput
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime
    from fdasync.events.catalog import RequestPrepared
    from fdasync.request import GenerateRequest, Grammar
    from fdasync.result import Result, Sample
    from fdasync.scheduler import Order, Policy


# the policy orders a text before it is tokenised: so many characters count as a token
_TOKEN_CHARS = 4


class AdmissionLimiter:
    """A bounded number of live samples; a request that finds no place waits, in the policy's order.

    Attributes:
        limit: places; a sample takes one.
        used: places that are taken.
    """

    def __init__(self, limit: int, policy: Policy) -> None:
        self.limit = limit
        self.used = 0
        self._policy = policy
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, count: int, candidate: Candidate) -> None:
        """Take `count` places. The caller's deadline bounds the wait; cancelling gives the place up."""
        order = self._policy.order(candidate)
        first = not self._waiting or order < self._waiting[0][0]
        if first and self.used + count <= self.limit:
            self.used += count
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # arrivals differ, so futures are never compared
        entry = (order, count, place)
        insort(self._waiting, entry)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(count)
            else:
                # `_grant` has removed it where a place came free after the cancellation
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._grant()
            raise

    def enter_now(self, count: int) -> bool:
        """Take `count` places if they are free and no request waits for one."""
        if self._waiting or self.used + count > self.limit:
            return False
        self.used += count
        return True

    def leave(self, count: int) -> None:
        self.used -= count
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][1] <= self.limit:
            _, count, place = self._waiting.pop(0)
            if not place.done():
                self.used += count
                place.set_result(None)


class Frontend:
    """Takes requests in and keeps their names.

    Args:
        check_open: raises unless the engine takes requests; with True it lets requests pass that came before a drain.

    Attributes:
        failure_seen: a caller got the engine's failure.
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
        self._limiter = AdmissionLimiter(config.max_requests, runtime.policy)
        # bytes of chosen positions
        self._chosen = AdmissionLimiter(config.chosen_positions_nbytes, runtime.policy)
        self._live: dict[str, RequestState] = {}
        self._keys = itertools.count()

    @property
    def num_live(self) -> int:
        """Live samples."""
        return self._limiter.used

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return self._limiter.num_waiting

    def find(self, request_id: str) -> RequestState | None:
        return self._live.get(request_id)

    def requests(self) -> list[RequestState]:
        """All requests that have not ended; some may still wait for a place."""
        return list(self._live.values())

    async def submit(self, ask: GenerateRequest) -> RequestState:
        """Check, wait for a place, prepare, publish. Raises as `Engine.generate` says."""
        self._check_open(False)
        limit_s = self._config.request_deadline_s if ask.deadline_s is None else ask.deadline_s
        # the check copies: the caller may change its lists meanwhile
        ask = self._preparer.check(ask, limit_s)
        name = f"{self._rng.getrandbits(64):016x}" if ask.request_id is None else ask.request_id
        if name in self._live:
            raise DuplicateRequestId(name)
        now = asyncio.get_running_loop().time()
        # a request that another instance decodes has no text here
        here = ask.hand_off is None
        params = ask.params if here else msgspec.structs.replace(ask.params, stop=())
        request = RequestState(name, params, start=ask.start, now=now, part="whole" if here else "prefill")
        request.trace = ask.trace
        self._live[name] = request
        # a request that another instance decodes takes no rows here: if it is aborted, it returns none of each spec
        request.specs = wanted_specs(self._runtime.capacity.aux_specs, ask.routing, ask.aux)
        entered = False
        try:
            # bare deadline: the caller's own, which gets what there is
            async with asyncio.timeout_at(now + limit_s) as request.limit:
                keys = [next(self._keys) for _ in range(ask.params.n)]
                arrived_at = now - ask.waited_s
                candidate = _candidate(ask, keys[0], arrived_at)
                await self._limiter.enter(ask.params.n, candidate)
                entered = True
                self._check_open(True)
                events = await self._preparer.prepare(
                    ask, keys, rows=bool(request.specs), arrived_at=arrived_at, deadline=now + limit_s
                )
                request.asked = ask, events[0]
                if request.params.chosen_positions_start is not None:
                    await self._lend(request, keys, len(events[0].tokens), candidate)
            if request.done.done():
                # aborted, or the engine closed, while it was being prepared
                self._forget(request, entered)
                return request
            self._check_open(True)
        except TimeoutError as error:
            aborted = request.done.done()
            if not aborted and not isinstance(error, DeadlineExceeded):
                self._runtime.processor.cut(request, "deadline")
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
        self._runtime.processor.add(request, keys, self._runtime.tokenizer)
        for event in events:
            self._runtime.bus.publish(event)
        return request

    def _chosen_freed(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        """The memory of a sample's chosen positions is no more. Its last reference may go in any thread, and in the
        midst of anything, so the bytes are given back in a turn of the loop."""
        # once the loop is closed no request waits for bytes
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._chosen.leave, nbytes)

    async def _lend(self, request: RequestState, keys: list[int], prompt_tokens: int, candidate: Candidate) -> None:
        """Make the memory of its chosen positions, where it wants some, and lend it to the runner. It has its places
        and waits for bytes: a request that has bytes waits for nothing but its reader. Raises BuffersOut where the
        machine, or the runner, has no such memory."""
        params, shape = request.params, self._runtime.capacity.chosen
        nbytes = chosen_nbytes(shape, params, prompt_tokens)
        if shape is None or not nbytes:
            return
        await self._chosen.enter(nbytes, candidate)
        try:
            freed = partial(self._chosen_freed, asyncio.get_running_loop())
            request.chosen = make_chosen(shape, params, prompt_tokens, freed)
        except OSError as error:
            raise BuffersOut(f"chosen positions ({error})", nbytes, self._chosen.limit, {}) from error
        runner = self._runtime.runner

        async def lend(key: int, chosen: ChosenOutput) -> None:
            # from here on the runner may have the memory, however this ends; a call cut short before has not begun
            request.lent.append(key)
            try:
                await runner.lend(key, chosen.rows)
            except Exception:
                request.lent.remove(key)
                raise

        calls = [lend(key, chosen) for key, chosen in zip(keys, request.chosen, strict=True)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for chosen in request.chosen:
            chosen.rows.close_fd()
        problems = [end for end in ends if isinstance(end, BaseException)]
        if problems:
            # a worker that died has failed the engine
            self._check_open(True)
            why = f"chosen positions (the runner cannot write them: {problems[0]})"
            raise BuffersOut(why, nbytes, self._chosen.limit, {}) from problems[0]

    async def check_grammar(self, grammar: Grammar) -> None:
        """Check the grammar of a request that another instance prefills, before it is taken over.

        Raises BadInput, DeadlineExceeded, and what ends the engine meanwhile.
        """
        self._check_open(False)
        await self._preparer.check_grammar(grammar)

    def take_over(
        self, name: str, ask: GenerateRequest, given: PromptHashes, limit_s: float
    ) -> tuple[RequestState, list[RequestPrepared]]:
        """Take in a request that another instance prefills, without waiting. The caller publishes its events.

        Args:
            ask: the request, its prompt tokenised by the other instance.
            given: identities of the prompt's blocks, computed by the other instance.
            limit_s: seconds until its deadline.

        Raises BadInput, DuplicateRequestId, EngineClosed, EngineFailed, and EngineBusy where there is no place.
        """
        self._check_open(False)
        ask = self._preparer.check(ask, limit_s)
        if name in self._live:
            raise DuplicateRequestId(name)
        count = ask.params.n
        if not self._limiter.enter_now(count):
            raise EngineBusy(self._limiter.used, self._limiter.limit)
        now = asyncio.get_running_loop().time()
        request = RequestState(name, ask.params, start=ask.start, now=now, part="decode")
        request.trace = ask.trace
        request.specs = wanted_specs(self._runtime.capacity.aux_specs, ask.routing, ask.aux)
        keys = [next(self._keys) for _ in range(count)]
        events = self._preparer.events(
            ask,
            ask.prompt,
            given,
            keys,
            rows=bool(request.specs),
            arrived_at=now - ask.waited_s,
            deadline=now + limit_s,
            scores=False,
        )
        request.asked = ask, events[0]
        request.prompt = events[0].tokens
        self._live[name] = request
        self._runtime.processor.add(request, keys, self._runtime.tokenizer)
        return request, events

    def abort(self, request: RequestState) -> None:
        """End a request with what it has: nothing while it waits for a place. An ended request stays as it is."""
        if request.done.done():
            return
        keys = [sample.key for sample in request.samples if sample.finish is None]
        if keys:
            self._runtime.bus.publish(AbortRequested(keys=tuple(keys)))
        elif not request.samples:
            self._runtime.processor.cut(request, "abort")
            if request.limit is not None and not request.limit.expired():
                # ends its wait for a place or for its preparation
                request.limit.reschedule(0.0)

    def abort_all(self, prefix: str) -> int:
        """End the requests whose names start with `prefix`; returns how many had not ended."""
        live = [request for request in self.requests() if request.request_id.startswith(prefix)]
        # a request that was aborted while it waited for a place has ended, and keeps its name until its caller runs
        live = [request for request in live if not request.done.done()]
        for request in live:
            self.abort(request)
        return len(live)

    def abort_unprepared(self) -> None:
        """End the requests that the scheduler does not know yet."""
        for request in self.requests():
            if not request.samples:
                self.abort(request)

    def ended(self, request: RequestState) -> None:
        """Called by the output processor when the request has its result."""
        self._forget(request, entered=True)

    async def leave(self, request: RequestState) -> None:
        """Abort a request if it has not ended, and wait until it has: one turn of the driver."""
        if request.done.done():
            return
        self.abort(request)
        limit_s = self._config.close_deadline_s
        done, _ = await wait_within([request.done], limit_s)
        if not done:
            raise DeadlineExceeded(f"aborting request {request.request_id}", limit_s)

    def result(self, request: RequestState) -> Result:
        """The result of an ended request. Raises EngineFailed if the engine's failure ended it, DecodeFailed if its
        text could not be made, GrammarFailed if its grammar could not be kept, ProcessorFailed if its logits could not
        be processed; all carry what there is."""
        result = request.result(self._runtime.capacity)
        if request.failure is not None:
            self.failure_seen = True
            raise EngineFailed(request.failure, result)
        if isinstance(request.spoiled, GrammarFailed | ProcessorFailed):
            raise type(request.spoiled)(request.spoiled.problem, result)
        if request.spoiled is not None:
            raise DecodeFailed(request.spoiled, result)
        return result

    def sample(self, request: RequestState, index: int) -> Sample:
        """A sample that has ended, of a request that may go on."""
        return request.samples[index].sample(self._runtime.capacity)

    def _forget(self, request: RequestState, entered: bool) -> None:
        self._live.pop(request.request_id, None)
        if not request.done.done():
            # its caller got an error instead of a result; `drain` must not wait for it
            request.done.cancel()
        for chosen in request.chosen:
            chosen.let_go()
        if entered:
            self._limiter.leave(request.params.n)
        lent, request.lent = request.lent, []
        for key in lent:
            self._runtime.runner.take_back(key)


def _candidate(ask: GenerateRequest, group: int, arrived_at: float) -> Candidate:
    """A request that is not prepared yet, as the policy sees it."""
    count = len(ask.prompt)
    tokens = max(count // _TOKEN_CHARS, 1) if isinstance(ask.prompt, str) else count
    # the numbers of samples grow with the requests
    return Candidate(priority=ask.priority, arrival=group, arrived_at=arrived_at, prompt_tokens=tokens, group=group)
