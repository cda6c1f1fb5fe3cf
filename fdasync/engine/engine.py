"""The front door: `async with Engine(config) as engine`, then `generate`, `complete`, `abort`, `drain`.

Owns one supervisor task, and through it everything that runs (`runtime.py`); requests come in through
`frontend.py`. A request's failure is its own; a broken invariant, a failed step or a dead worker fails the
engine, and every pending and later call raises `EngineFailed` - the caller's own task is never cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from fdasync.engine.config import EngineConfig
from fdasync.engine.frontend import Door
from fdasync.engine.inputs import Ask
from fdasync.engine.prepare import Preparer
from fdasync.engine.runtime import Runtime, to_its_end
from fdasync.engine.stream import Generation
from fdasync.engine.weights import Weights, refuse_broken
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, EngineClosed, EngineFailed, TaskCancelled
from fdasync.events.catalog import EngineDied, LoopHeldUp
from fdasync.ipc.deadlines import Within
from fdasync.request import SamplingParams
from fdasync.scheduler import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Store
    from fdasync.engine.output import OutputHub
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.engine.weights import WeightSource
    from fdasync.events.actions import Action
    from fdasync.events.bus import EventBus
    from fdasync.events.trace import TraceRing
    from fdasync.result import Result
    from fdasync.runner.base import Capacity, Runner

    Prompt = str | Sequence[int]

_LATENESS_PERIOD_S = 0.1
# what taps are told of
_HELD_UP_S = 0.05


class Shared(NamedTuple):
    """Parts of an engine that services for other instances work with.

    Attributes:
        capacity, namespace: of the weights in use, now.
        fail: ends the engine.
    """

    bus: EventBus
    door: Door
    hub: OutputHub
    host: HostArena
    arena: AuxArena | None
    capacity: Callable[[], Capacity]
    namespace: Callable[[], bytes]
    fail: Callable[[BaseException], None]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine.

    Attributes:
        live, at_the_door: samples inside, and requests that wait to come in.
        steps_in_flight: launched and not completed.
        updating: a weight update is under way.
        loop_late_max_s: the longest that the engine's loop was held up since the last call of `stats`.
        refused_writes: blocks that the store did not take; refused_why: its words about the latest, e.g. how much room
            it needs and how much there is.
        store_problem: why the store is not asked for now; "" while it is used, and where there is none.
    """

    state: str
    live: int
    at_the_door: int
    steps_in_flight: int
    updating: bool
    loop_late_max_s: float
    scheduler: SchedulerStats
    refused_writes: int = 0
    refused_why: str = ""
    store_problem: str = ""


class Engine:
    """See the module; states are new, starting, running, draining, closed, failed.

    Args:
        config: an EngineConfig, or a mapping of its keys. Raises ConfigError or PluginError at once.
        runner: a runner object instead of the one that the config names, used in this process (tests).
        tokenizer: a tokenizer object instead of the one that the config names.
        store: a store object instead of the one that the config names (which must name some), used in this process.

    `async with` starts it; it may be entered and left from different tasks through `start` and `aclose`.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        store: Store | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            if not isinstance(config, Mapping):
                raise ConfigError("config", f"an EngineConfig or a mapping is needed, not {type(config).__name__}")
            config = EngineConfig.from_mapping(config)
        config.validate()
        self.config = config
        self.state = "new"
        self._runtime = Runtime(config, runner, tokenizer, store)
        self._door: Door | None = None
        self._weights: Weights | None = None
        self._failure: BaseException | None = None
        self._on_failed: Callable[[], None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._close_told = False
        self._late_max_s = 0.0

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.aclose()
        seen = self._door is not None and self._door.failure_seen
        if self._failure is not None and not seen and error is None:
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
        # where nobody waits any more, its error is nobody's
        started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._supervisor = loop.create_task(self._supervise(started), name="fdasync-engine")
        try:
            # a supervisor that is cancelled before its first step never tells
            await asyncio.wait([started, self._supervisor], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise EngineClosed("closed")
            started.result()  # of a future that is done
        except BaseException:
            self._stop.set()
            # who is cancelled once more leaves it to end by itself; what closing raises is `aclose`'s to tell
            await asyncio.wait([self._supervisor])
            raise

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """The engine's life. Who cancels it, as `asyncio.run` does to all tasks at its end, fails the engine: of other
        tasks cancelled with it nobody would be told."""
        starting = asyncio.ensure_future(self._open())
        try:
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            opened = starting.done() and not starting.cancelled() and starting.exception() is None
            if opened and not self._stop.is_set():
                self.state = "running"
                started.set_result(None)
                await self._run()
        except asyncio.CancelledError:
            self._fail(TaskCancelled("fdasync-engine"))
        finally:
            await self._end(starting, started)

    async def _run(self) -> None:
        """Until it is to stop; then requests and steps come to their ends."""
        async with asyncio.TaskGroup() as group:
            lateness = group.create_task(self._watch_lateness(), name="fdasync-lateness")
            await self._stop.wait()
            lateness.cancel()
        if self._failure is None and self._weights is not None:
            try:
                interrupted = await self._weights.aclose()
                await self._runtime.wind_down(resume=not interrupted)
            except Exception as error:
                self._fail(error)

    async def _end(self, starting: asyncio.Future[None], started: asyncio.Future[None]) -> None:
        """Free everything, however far it got; nobody cancels this. Raises what closing raises."""
        starting.cancel()
        await to_its_end("starting", lambda: asyncio.wait([starting]))
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            self.state = "failed"
        if not started.done():
            started.set_exception(error or self._word())
        try:
            if self._weights is not None:
                await to_its_end("ending an update", self._weights.aclose)
            await self._runtime.release()
        finally:
            if self.state != "failed":
                self.state = "closed"

    async def _open(self) -> None:
        rng = Random(self.config.seed)
        runtime = self._runtime
        await runtime.open(self._fail, lambda request: self._inside().ended(request))
        preparer = Preparer(self.config, runtime.capacity, runtime.tokenizer, runtime.long_texts, rng)
        self._weights = Weights(self.config, runtime, preparer, self._fail, lambda: self._check_open(True))
        self._door = Door(self.config, runtime, preparer, rng, self._check_door)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new requests and wait until the live ones ended; the engine stays open for `stats` and `aclose`.

        Raises DeadlineExceeded after `timeout_s` (default: the config's request_deadline_s), EngineFailed.
        """
        self._check_open(draining_is_fine=True)
        door = self._inside()
        limit_s: Any = self.config.request_deadline_s if timeout_s is None else timeout_s
        if not isinstance(limit_s, int | float) or not 0 <= limit_s <= 1e9:
            raise BadInput("timeout_s", f"{limit_s!r} is out of range", limit="0 to 1e9")
        self.state = "draining"
        try:
            async with Within(limit_s):
                while live := door.requests():
                    await asyncio.wait([request.done for request in live])
                    # ends free their ids before their readers run; one turn lets those read
                    await asyncio.sleep(0)
        except TimeoutError:
            raise DeadlineExceeded(f"draining {len(door.requests())} requests", limit_s) from None
        if self._failure is not None:
            door.failure_seen = True
            raise EngineFailed(self._failure)

    async def aclose(self) -> None:
        """Abort what is live, let steps in flight end, free everything; idempotent.

        Callers get what there is; those still at the door get EngineClosed. Raises, once, what closing the runner
        raises.
        """
        if self._supervisor is None:
            self.state = "closed"
            return
        if self.state in ("running", "draining"):
            self.state = "closing"
        self._stop.set()
        # a caller that is cancelled here leaves the closing to go on
        await asyncio.wait([self._supervisor])
        if self._supervisor.cancelled():
            # before its first step: there is nothing of it
            self.state = "closed"
            return
        error = self._supervisor.exception()
        if error is not None and not self._close_told:
            self._close_told = True
            raise error

    def _fail(self, cause: BaseException) -> None:
        """The engine cannot go on: everyone who waits is told, then the supervisor frees what there is."""
        if self._failure is not None:
            return
        self._failure = cause
        self.state = "failed"
        self._stop.set()
        if self._door is None:
            # it was still starting: `start` tells
            return
        door = self._door
        door.failure_seen = bool(door.requests())
        self._runtime.fail(cause)
        if self._on_failed is not None:
            self._on_failed()
        # no turn follows that would feed the taps
        bus = self._runtime.bus
        bus.publish(EngineDied(problem=f"{type(cause).__name__}: {cause}"))
        bus.feed_taps(bus.drain())

    def _word(self) -> EngineClosed | EngineFailed:
        """What a start ends with that somebody stopped."""
        return EngineClosed("closed") if self._failure is None else EngineFailed(self._failure)

    def _inside(self) -> Door:
        if self._door is None:
            raise EngineClosed(self.state)
        return self._door

    def _check_open(self, draining_is_fine: bool = False) -> None:
        if self._failure is not None:
            self._inside().failure_seen = True
            raise EngineFailed(self._failure)
        if self.state != "running" and not (draining_is_fine and self.state == "draining"):
            raise EngineClosed(self.state)

    def _check_door(self, draining_is_fine: bool) -> None:
        self._check_open(draining_is_fine)
        refuse_broken(self._weights)

    async def _watch_lateness(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LATENESS_PERIOD_S)
            late_s = loop.time() - before - _LATENESS_PERIOD_S
            self._late_max_s = max(self._late_max_s, late_s)
            if late_s >= _HELD_UP_S:
                self._runtime.bus.publish(LoopHeldUp(seconds=late_s))

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
        aux: bool | Sequence[str] | None = None,
        start: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """A stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

        Args:
            prompt: text, or token ids (a sequence of ints, or an array with `tolist`); copied, never changed.
            params: how to sample; default SamplingParams().
            request_id: one's own name for it, unique among live requests; drawn when None.
            priority: higher is admitted first and preempted last; equal ones in order of arrival.
            deadline_s: from now; at its end the request returns with finish_reason "deadline".
            routing: return expert routing; None: if the engine captures it; True: raise where it does not.
            aux: return other rows that the runner writes for each token (`Sample.aux`), whether or not routing is
                wanted: names (of the runner's `AuxSpec`s; the error of an unknown one lists them), or None: all that
                there are; True: the same, and raise where there are none; False: none.
            start: first position whose rows are wanted, inside the prompt; the result echoes it.
            cache_salt: requests share prefixes only with those of the same salt, of up to 4096 characters.

        Entering waits for a place (`max_requests`) and for tokenising. It raises BadInput, DuplicateRequestId,
        EngineClosed, EngineFailed, TokenizerFailed, and DeadlineExceeded, WorkerDied or
        WorkerStuck of the process that tokenises long texts. Reading raises EngineFailed or DecodeFailed. Leaving
        early aborts the request.
        """
        ask = Ask(
            prompt=prompt,
            params=SamplingParams() if params is None else params,
            streams=True,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            routing=routing,
            aux=aux,
            start=start,
            cache_salt=cache_salt,
        )
        return Generation(self._inside(), ask)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        aux: bool | Sequence[str] | None = None,
        start: int = 0,
        cache_salt: str = "",
    ) -> Result:
        """The end only; see `generate` for arguments and errors. Cancelling it aborts the request.

        Raises EngineFailed with `.partial` if the engine fails meanwhile, DecodeFailed likewise if its text cannot be
        made.
        """
        ask = Ask(
            prompt=prompt,
            params=SamplingParams() if params is None else params,
            streams=False,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            routing=routing,
            aux=aux,
            start=start,
            cache_salt=cache_salt,
        )
        async with Generation(self._inside(), ask) as stream:
            return await stream.finished()

    def abort(self, request_id: str) -> bool:
        """End a live request now; it returns normally, with what it has and finish_reason "abort".

        True if there is such a request; aborting twice, or one that just ended, does no harm.
        """
        if not isinstance(request_id, str):
            raise BadInput("request_id", f"{request_id!r} is no name")
        request = None if self._door is None else self._door.find(request_id)
        if request is None or self._door is None:
            return False
        self._door.abort(request)
        return True

    # -- weights --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Plan no more steps; returns when none is in flight. Requests keep what they have, new ones wait.

        Deadlines go on. Cancelling takes the pause back, unless it was there before.

        Idempotent. Raises EngineFailed if the steps in flight do not end by their deadline, EngineClosed.
        """
        await self._changing().pause()

    async def resume(self) -> None:
        """Go on after `pause`; during an update, at its end. Idempotent.

        Raises WeightsBroken, EngineClosed, EngineFailed.
        """
        await self._changing().resume()

    async def update_weights(
        self, version: int, source: WeightSource, mode: Literal["abort", "keep"] = "abort"
    ) -> None:
        """Load new weights: pause, let steps end, load, forget every cached block, go on (unless it was paused before).

        Args:
            version: your label, never used before; results tell it for each span of their tokens. It starts at the
                config's weight_version.
            source: a checkpoint folder, or (name, dtype, shape, buffer) tuples: names as in the checkpoint or the
                model's state dict, numpy's dtype name or "bfloat16", a C-contiguous buffer. Names left out keep their
                values. Buffers are read until this returns.
            mode: "abort": requests that ran end with what they have, and finish_reason "abort"; those that still waited
                run under the new weights. "keep": all go on; those with KV on the device use it to their end, the
                others start again from their tokens under the new weights.

        Raises BadInput; WeightsRejected when the source does not fit (nothing has changed, the engine goes on);
        WeightsBroken when loading failed half-way (it stays paused and takes only this call or `aclose`);
        EngineFailed, EngineClosed. Cancelling stops the waiting: the update goes on to its end, and reads the buffers
        until `stats().updating` is False.
        """
        await self._changing().update(version, source, mode)

    def _changing(self) -> Weights:
        self._inside()
        assert self._weights is not None
        return self._weights

    # -- other instances ------------------------------------------------------------------------------

    def share(self, close_transports: Callable[[], Awaitable[None]]) -> Shared:
        """What services for other instances work with (`fdasync.Instance`).

        Args:
            close_transports: ends all copies from and to the arenas; called before these are freed.

        Raises EngineClosed before the start, ConfigError without a host tier.
        """
        door, runtime = self._inside(), self._runtime
        host, arena = runtime.share(close_transports)
        return Shared(
            runtime.bus, door, runtime.hub, host, arena, lambda: runtime.capacity, lambda: runtime.namespace, self.fail
        )

    def attend(self, perform: Callable[[Action], None], failed: Callable[[], None]) -> None:
        """Have the scheduler's actions that concern other instances performed, and `failed` called if it fails."""
        self._inside()
        assert self._runtime.driver is not None
        self._runtime.driver.attendant = perform
        self._on_failed = failed

    def fail(self, cause: BaseException) -> None:
        """End the engine: something that belongs to it cannot go on. Idempotent."""
        if self.state in ("running", "draining", "closing"):
            self._fail(cause)

    # -- looking in -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """What the runner is. Raises EngineClosed before the start."""
        self._inside()
        return self._runtime.capacity

    @property
    def bus(self) -> EventBus:
        """Subscribe to events: `async with engine.bus.subscribe(StepDone, limit=1024) as steps`."""
        self._inside()
        return self._runtime.bus

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What makes tokens of text; None: tokens in, tokens out. Raises EngineClosed before the start."""
        self._inside()
        return self._runtime.tokenizer

    @property
    def store_pid(self) -> int:
        """Process id of the store's own process; -1 where it has none (no store, or one that never blocks)."""
        self._inside()
        return self._runtime.store_pid

    def stats(self) -> EngineStats:
        """What it is doing now. Raises EngineClosed before the start."""
        door, driver = self._inside(), self._runtime.driver
        assert driver is not None
        late, self._late_max_s = self._late_max_s, 0.0
        refused, why = self._runtime.refused_writes
        return EngineStats(
            state=self.state,
            live=door.num_live,
            at_the_door=door.num_waiting,
            steps_in_flight=driver.steps_in_flight,
            updating=self._weights is not None and self._weights.is_updating,
            loop_late_max_s=late,
            scheduler=driver.scheduler.stats(),
            refused_writes=refused,
            refused_why=why,
            store_problem=self._runtime.store_problem,
        )

    def trace(self) -> TraceRing:
        """The latest turns. Raises ConfigError unless `trace_turns` is set."""
        if self._runtime.trace is None:
            raise ConfigError("config.trace_turns", "is 0: nothing was recorded")
        return self._runtime.trace

    def check(self) -> None:
        """Raise InvariantBroken unless the scheduler's books are right. For tests and idle time."""
        self._inside()
        assert self._runtime.driver is not None
        self._runtime.driver.scheduler.check()
