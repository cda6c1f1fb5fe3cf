"""The front door: `async with Engine(config) as engine`, then `generate`, `complete`, `abort`, `drain`.

Owns one supervisor task (and in it everything that runs), the runner, the arena and the driver. A
request's failure is its own; a broken invariant, a failed step or a dead worker fails the engine, and
every pending and later call raises `EngineFailed` - the caller's own task is never cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.arena import AuxArena
from fdasync.config import EngineConfig, decode_plugin_config, resolve
from fdasync.driver import Driver
from fdasync.errors import ConfigError, DeadlineExceeded, DuplicateRequestId, EngineClosed, EngineFailed
from fdasync.events.catalog import AbortRequested
from fdasync.events.trace import TraceRing
from fdasync.output import OutputHub, RequestOutput
from fdasync.prepare import Intake, Preparer
from fdasync.registry import Registry
from fdasync.request import SamplingParams
from fdasync.runner.worker import WorkerRunner
from fdasync.scheduler import Scheduler, SchedulerStats
from fdasync.stream import Generation
from fdasync.tokenise import TokenizerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fdasync.events.bus import EventBus
    from fdasync.result import Result
    from fdasync.runner.base import Capacity, Runner
    from fdasync.tokenizer import Tokenizer

    Prompt = str | Sequence[int]

_LATENESS_PERIOD_S = 0.1


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine.

    Attributes:
        live, at_the_door: samples inside, and requests that wait to come in.
        steps_in_flight: launched and not completed.
        loop_late_max_s: the longest that the engine's loop was held up since the last call of `stats`.
    """

    state: str
    live: int
    at_the_door: int
    steps_in_flight: int
    loop_late_max_s: float
    scheduler: SchedulerStats


class Engine:
    """See the module; states are new, starting, running, draining, closed, failed.

    Args:
        config: an EngineConfig, or a mapping of its keys. Raises ConfigError or PluginError at once.
        runner: a runner object instead of the one that the config names, used in this process (tests).
        tokenizer: a tokenizer object instead of the one that the config names.

    `async with` starts it; it may be entered and left from different tasks through `start` and `aclose`.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = EngineConfig.from_mapping(config)
        config.validate()
        self.config = config
        self.state = "new"
        self._registry = Registry()
        self._runner = runner or self._make_runner()
        self._tokenizer = tokenizer
        self._long_texts: TokenizerProcess | None = None
        self._arena: AuxArena | None = None
        self._failure: BaseException | None = None
        self._failure_seen = False
        self._supervisor: asyncio.Task[None] | None = None
        self._intake = Intake(config.max_requests)
        self._ids: dict[str, RequestOutput] = {}
        self._keys = itertools.count()
        self._rng = random.Random(config.seed)
        self._late_max_s = 0.0

    def _make_runner(self) -> Runner:
        config = self.config
        limits = config.runner_limits()
        if config.process == "worker":
            # found, not imported: what a runner imports belongs in its own process
            self._registry.find("fdasync.runners", config.runner)
            return WorkerRunner(config.runner, config.runner_config, limits, close_deadline_s=config.close_deadline_s)
        runner_type = self._registry.load_runner(config.runner)
        own = decode_plugin_config(runner_type.config_type, config.runner_config, "runner_config")
        return runner_type(own, limits)

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.aclose()
        if self._failure is not None and not self._failure_seen and error is None:
            # a failure that no caller has seen must not end in silence
            raise EngineFailed(self._failure)

    async def start(self) -> None:
        """Load, profile, check; returns when requests may come.

        Raises what the runner raises (CheckpointError, UnsupportedModel, ConfigError), WorkerDied, or
        DeadlineExceeded; then nothing is left behind.
        """
        if self.state != "new":
            raise EngineClosed(self.state)
        self.state = "starting"
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Event = asyncio.Event()
        started: asyncio.Future[None] = loop.create_future()
        self._supervisor = loop.create_task(self._supervise(started), name="fdasync-engine")
        try:
            await asyncio.shield(started)
        except BaseException:
            self._stop.set()
            await self._supervisor
            raise

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        try:
            starting = asyncio.ensure_future(self._open())
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])
            if starting.cancelled() or starting.exception() is not None:
                self.state = "failed"
                error = None if starting.cancelled() else starting.exception()
                if not started.done():
                    started.set_exception(error or EngineClosed("closed"))
                return
            self.state = "running"
            started.set_result(None)
            async with asyncio.TaskGroup() as group:
                lateness = group.create_task(self._watch_lateness(), name="fdasync-lateness")
                await self._stop.wait()
                lateness.cancel()
            if self._failure is None:
                await self._wind_down()
        finally:
            await self._release()

    async def _open(self) -> None:
        config = self.config
        try:
            async with asyncio.timeout(config.start_deadline_s):
                capacity = await self._runner.open()
                scheduler_config = resolve(config, capacity)
                if capacity.aux_specs:
                    self._arena = AuxArena.create(capacity.num_blocks, capacity.block_tokens, capacity.aux_specs)
                await self._runner.bind(capacity.num_blocks, self._arena)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded("starting the runner", config.start_deadline_s) from None
        self.capacity: Capacity = capacity
        self._load_tokenizer(capacity)
        scheduler = Scheduler(scheduler_config)
        self._trace = TraceRing(scheduler, config.trace_turns) if config.trace_turns else None
        loop = asyncio.get_running_loop()
        self._driver = Driver(
            loop, scheduler, self._runner, step_deadline_s=config.step_deadline_s, trace=self._trace,
            on_failure=self._fail,
        )  # fmt: skip
        self._hub = OutputHub(self._driver.bus, loop.time, self._arena, capacity, self._ended)
        self._driver.output = self._hub
        self._preparer = Preparer(
            capacity,
            prefix_cache=config.prefix_cache,
            tokenizer=self._tokenizer,
            long_texts=self._long_texts,
            inline_chars=config.inline_tokenise_chars,
            prepare_deadline_s=config.prepare_deadline_s,
            intake_limit=config.max_requests,
            rng=self._rng,
        )
        self._runner.on_failure = self._fail

    def _load_tokenizer(self, capacity: Capacity) -> None:
        if self._tokenizer is not None or self.config.tokenizer == "none":
            return
        name = capacity.tokenizer if self.config.tokenizer == "auto" else self.config.tokenizer
        if name:
            self._tokenizer = self._registry.load_tokenizer(name)(self.config.model)  # blocking: once, at start
            self._long_texts = TokenizerProcess(name, self.config.model)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new requests and wait until the live ones ended; the engine stays open for `stats` and `aclose`.

        Raises DeadlineExceeded after `timeout_s` (default: the config's request_deadline_s), EngineFailed.
        """
        self._check_open(draining_is_fine=True)
        self.state = "draining"
        limit = self.config.request_deadline_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit):
                while self._ids:
                    await asyncio.wait([request.done for request in self._ids.values()])
                    # ends free their ids before their readers run; one turn lets those read
                    await asyncio.sleep(0)
        except TimeoutError:
            raise DeadlineExceeded(f"draining {len(self._ids)} requests", limit) from None
        if self._failure is not None:
            self._failure_seen = True
            raise EngineFailed(self._failure)

    async def aclose(self) -> None:
        """Abort what is live (its callers get what there is), let steps in flight end, free everything; idempotent."""
        if self._supervisor is None:
            self.state = "closed"
            return
        if self.state in ("running", "draining"):
            self.state = "closing"
        self._stop.set()
        # a caller that is cancelled here must not leave a half-closed engine behind
        await asyncio.shield(self._supervisor)
        if self.state != "failed":
            self.state = "closed"

    async def _wind_down(self) -> None:
        deadline_s = self.config.close_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                keys = [sample.key for request in self._hub.requests() for sample in request.samples]
                if keys:
                    self._driver.bus.publish(AbortRequested(keys=tuple(keys)))
                    await asyncio.wait([request.done for request in self._hub.requests()])
                await self._driver.wait_idle()
        except TimeoutError:
            self._fail(self._runner.overdue(-1, deadline_s))

    async def _release(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:
            driver.stop()
            driver.bus.close()
        await self._runner.aclose()
        if self._long_texts is not None:
            await self._long_texts.aclose()
        if self._arena is not None:
            self._arena.close()

    def _fail(self, cause: BaseException) -> None:
        """The engine cannot go on: everyone who waits is told, then the supervisor frees what there is."""
        if self._failure is not None:
            return
        self._failure = cause
        self.state = "failed"
        self._driver.stop()
        self._failure_seen = bool(self._ids)
        self._hub.fail(cause, [] if self._driver.broken else self._driver.scheduler.salvage())
        self._stop.set()

    async def _watch_lateness(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LATENESS_PERIOD_S)
            self._late_max_s = max(self._late_max_s, loop.time() - before - _LATENESS_PERIOD_S)

    # -- requests -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        start: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """A stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

        Args:
            prompt: text, or token ids (any sequence, or an array with `tolist`); never changed or kept.
            params: how to sample; default SamplingParams().
            request_id: one's own name for it, unique among live requests; drawn when None.
            priority: higher is admitted first and preempted last; equal ones in order of arrival.
            deadline_s: from now; at its end the request returns with finish_reason "deadline".
            routing: return expert routing; None: if the engine captures it; True: raise where it does not.
            start: first position whose rows are wanted, inside the prompt; the result echoes it.
            cache_salt: requests share prefixes only with those of the same salt.

        Entering waits for a place (`max_requests`) and for tokenising. It raises BadInput, DuplicateRequestId,
        EngineClosed, EngineFailed, and DeadlineExceeded or WorkerDied of the tokenizer's process. Leaving early
        aborts the request.
        """
        return Generation(self, prompt, params or SamplingParams(), streams=True, options={
            "request_id": request_id, "priority": priority, "deadline_s": deadline_s, "routing": routing,
            "start": start, "cache_salt": cache_salt,
        })  # fmt: skip

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        start: int = 0,
        cache_salt: str = "",
    ) -> Result:
        """The end only; see `generate` for arguments and errors. Cancelling it aborts the request.

        Raises EngineFailed with `.partial` if the engine fails meanwhile.
        """
        generation = Generation(self, prompt, params or SamplingParams(), streams=False, options={
            "request_id": request_id, "priority": priority, "deadline_s": deadline_s, "routing": routing,
            "start": start, "cache_salt": cache_salt,
        })  # fmt: skip
        async with generation as stream:
            return await stream.finished()

    def abort(self, request_id: str) -> bool:
        """End a live request now; it returns normally, with what it has and finish_reason "abort".

        True if there is such a request; aborting twice, or one that just ended, does no harm.
        """
        request = self._ids.get(request_id)
        if request is None:
            return False
        self.abort_request(request)
        return True

    def abort_request(self, request: RequestOutput) -> None:
        """For streams. Before its samples are published, ending it is all there is to do."""
        if request.done.done():
            return
        keys = [sample.key for sample in request.samples if sample.finish is None]
        if keys and self._failure is None:
            self._driver.bus.publish(AbortRequested(keys=tuple(keys)))
        elif not request.samples:
            self._hub.cut(request, "abort")
            if request.limit is not None and not request.limit.expired():
                # whatever it waits for at the door, it waits no longer
                request.limit.reschedule(0.0)

    async def submit(
        self, prompt: Prompt, params: SamplingParams, *, streams: bool, request_id: str | None, priority: int,
        deadline_s: float | None, routing: bool | None, start: int, cache_salt: str,
    ) -> RequestOutput:  # fmt: skip
        """For streams: check, wait for a place, prepare, publish."""
        self._check_open()
        limit_s = self.config.request_deadline_s if deadline_s is None else deadline_s
        self._preparer.check(
            prompt, params, routing=routing, start=start, priority=priority, deadline_s=limit_s, cache_salt=cache_salt
        )
        name = f"{self._rng.getrandbits(64):016x}" if request_id is None else request_id
        if name in self._ids:
            raise DuplicateRequestId(name)
        now = asyncio.get_running_loop().time()
        request = RequestOutput(name, params, streams=streams, start=start, now=now)
        self._ids[name] = request
        rows = request.wants_rows = self.capacity.aux_specs != () and routing is not False
        entered = False
        try:
            async with asyncio.timeout_at(now + limit_s) as request.limit:
                await self._intake.enter(params.n)
                entered = True
                self._check_open(draining_is_fine=True)
                keys = [next(self._keys) for _ in range(params.n)]
                events = await self._preparer.prepare(
                    prompt, params, keys, streams=streams, rows=rows, start=start, priority=priority,
                    deadline=now + limit_s, cache_salt=cache_salt,
                )  # fmt: skip
        except TimeoutError as error:
            aborted = request.done.done()
            if not aborted and not isinstance(error, DeadlineExceeded):
                self._hub.cut(request, "deadline")
            self._forget(request, entered)
            if not aborted and isinstance(error, DeadlineExceeded):
                raise
            return request
        except BaseException:
            self._forget(request, entered)
            raise
        finally:
            request.limit = None
        if request.done.done():
            # aborted, or the engine closed, while it was being prepared
            self._forget(request, entered)
            return request
        try:
            self._check_open(draining_is_fine=True)
        except BaseException:
            self._forget(request, entered)
            raise
        request.prompt = events[0].tokens
        self._hub.add(request, keys, self._tokenizer, rows=rows)
        for event in events:
            self._driver.bus.publish(event)
        return request

    def _ended(self, request: RequestOutput) -> None:
        self._forget(request, entered=True)

    def _forget(self, request: RequestOutput, entered: bool) -> None:
        self._ids.pop(request.request_id, None)
        if not request.done.done():
            # its caller has an error instead of a result; `drain` must not wait for it
            request.done.cancel()
        if entered:
            self._intake.leave(request.params.n)

    def _check_open(self, *, draining_is_fine: bool = False) -> None:
        if self._failure is not None:
            self._failure_seen = True
            raise EngineFailed(self._failure)
        if self.state != "running" and not (draining_is_fine and self.state == "draining"):
            raise EngineClosed(self.state)

    def failed(self, request: RequestOutput) -> EngineFailed:
        """For streams: the error of a request that the engine's failure ended, with what it has."""
        assert request.failure is not None
        self._failure_seen = True
        return EngineFailed(request.failure, request.result(self._hub))

    def result_of(self, request: RequestOutput) -> Result:
        """For streams."""
        return request.result(self._hub)

    # -- looking in -----------------------------------------------------------------------------------

    @property
    def bus(self) -> EventBus:
        """Subscribe to events: `async with engine.bus.subscribe(StepDone, limit=1024) as steps`."""
        return self._driver.bus

    def stats(self) -> EngineStats:
        """What it is doing now. Raises EngineClosed before the start."""
        if self.state in ("new", "starting"):
            raise EngineClosed(self.state)
        late, self._late_max_s = self._late_max_s, 0.0
        return EngineStats(
            state=self.state,
            live=self._intake.used,
            at_the_door=self._intake.num_waiting,
            steps_in_flight=self._driver.steps_in_flight,
            loop_late_max_s=late,
            scheduler=self._driver.scheduler.stats(),
        )

    def trace(self) -> TraceRing:
        """The latest turns. Raises ConfigError unless `trace_turns` is set."""
        if self._trace is None:
            raise ConfigError("config.trace_turns", "is 0: nothing was recorded")
        return self._trace

    def check(self) -> None:
        """Raise InvariantBroken unless the scheduler's books are right. For tests and idle time."""
        self._driver.scheduler.check()
