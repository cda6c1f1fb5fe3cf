"""What a running engine is made of: runner, arena, scheduler, driver, output, tokenizer; opened and released.

Built by `engine/engine.py`, which decides when; nothing here decides anything. `open` either gives a whole runtime
or leaves what `release` frees.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.cache.store.base import Store
from fdasync.engine.config import resolve
from fdasync.engine.driver import Driver
from fdasync.engine.output import OutputHub
from fdasync.engine.prepare import Rehasher, namespace_of
from fdasync.engine.store_io import Keeper
from fdasync.engine.store_stack import StoreStack
from fdasync.engine.tokenizer_process import TokenizerProcess
from fdasync.errors import ConfigError, DeadlineExceeded, FdasyncError, PluginError, RunnerError, TaskCancelled
from fdasync.events.catalog import AbortRequested, ResumeRequested
from fdasync.events.trace import TraceRing
from fdasync.ipc.deadlines import Closing, Within
from fdasync.registry.registry import RUNNERS, STORES, TOKENIZERS, Registry
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.output import RequestOutput
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action
    from fdasync.events.bus import EventBus
    from fdasync.runner.base import Capacity, Runner

# beyond the close deadline itself: killing and reaping a process
_REAP_S = 15.0
# of the close deadline, for what is closed after steps took all of it
_RELEASE_SHARE = 0.25


class _Stage(NamedTuple):
    """Something to close: what it is in words, how, and the longest that may take, in seconds."""

    what: str
    close: Callable[[], Awaitable[None]]
    limit_s: float

    async def run(self) -> None:
        """Raises what it raises, DeadlineExceeded at the limit."""
        try:
            async with Within(self.limit_s):
                await self.close()
        except FdasyncError:
            raise
        except TimeoutError:
            raise DeadlineExceeded(self.what, self.limit_s) from None


class Runtime:
    """The parts of one engine.

    Attributes:
        capacity, driver, hub, bus, trace: there once `open` returned.
        namespace: of the weights in use.
        tokenizer, long_texts: None means tokens in, tokens out.
    """

    capacity: Capacity
    namespace: bytes
    hub: OutputHub
    trace: TraceRing | None = None

    def __init__(
        self, config: EngineConfig, runner: Runner | None, tokenizer: Tokenizer | None, store: Store | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.long_texts: TokenizerProcess | None = None
        self.driver: Driver | None = None
        self._config = config
        self._registry = Registry()
        self.runner = runner or self._make_runner()
        self._transports: Callable[[], Awaitable[None]] | None = None
        self._stack: StoreStack | None = None
        self._keeper: Keeper | None = None
        self._closing = Closing(config.close_deadline_s)
        self._given_store = store
        given: object = store
        if given is not None and not isinstance(given, Store):
            raise ConfigError("store", f"{given!r:.100} is no Store")
        if store is not None and not config.store:
            raise ConfigError("config.store", "names no store, and a store object was given", hint="give it a name")
        if store is not None and store.blocking:
            raise ConfigError(
                "store",
                f"{type(store).__name__} may block, which no engine's loop can bear",
                hint="name it in config.store: it is hosted in a process of its own then",
            )
        if config.store and store is None:
            # only found: the class is imported at the start, here, to see if it wants a process of its own
            self._registry.find(STORES, config.store)
        if tokenizer is None and config.tokenizer not in ("auto", "none"):
            self._registry.find(TOKENIZERS, config.tokenizer)
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None

    def _make_runner(self) -> Runner:
        config = self._config
        limits = config.runner_limits()
        if config.process == "worker":
            # found, not imported: what a runner imports belongs in its own process
            self._registry.find(RUNNERS, config.runner)
            return WorkerRunner(config.runner, config.runner_config, limits, close_deadline_s=config.close_deadline_s)
        return self._registry.make_runner(config.runner, config.runner_config, limits)

    @property
    def bus(self) -> EventBus:
        assert self.driver is not None
        return self.driver.bus

    async def open(self, on_failure: Callable[[BaseException], None], on_end: Callable[[RequestOutput], None]) -> None:
        """Load, profile, allocate, check. Raises what the runner raises, DeadlineExceeded, CheckpointError."""
        config = self._config
        try:
            async with Within(config.start_deadline_s):
                self.capacity = capacity = await self.runner.open()
                if capacity.routing_debug != config.routing_debug:
                    raise ConfigError(
                        "config.routing_debug", f"runner {config.runner!r} does not know it, or no routing"
                    )
                self.namespace = namespace_of(capacity)
                scheduler = Scheduler(resolve(config, capacity, self.namespace))
                num_host_blocks = scheduler.config.num_host_blocks
                if capacity.aux_specs:
                    num_slots = capacity.num_blocks + num_host_blocks
                    self._arena = AuxArena.create(num_slots, capacity.block_tokens, capacity.aux_specs)
                if num_host_blocks:
                    self._host = HostArena.create(num_host_blocks, capacity.block_nbytes)
                await self.runner.bind(capacity.num_blocks, self._arena, self._host)
            if config.store:
                # under a deadline of its own: what can be done without does not use up the start
                await self._open_store()
        except TimeoutError as error:
            if isinstance(error, FdasyncError):
                raise
            raise DeadlineExceeded("starting the runner", config.start_deadline_s) from None
        except FdasyncError:
            raise
        except Exception as error:
            raise RunnerError(f"starting failed: {type(error).__name__}: {error}") from error
        self._load_tokenizer()
        if config.trace_turns:
            self.trace = TraceRing(scheduler.config, config.trace_turns)
        loop = asyncio.get_running_loop()
        self.driver = driver = Driver(
            loop,
            scheduler,
            self.runner,
            step_deadline_s=config.step_deadline_s,
            trace=self.trace,
            on_failure=on_failure,
        )
        self.hub = driver.output = OutputHub(
            self.bus, loop.time, self._arena, on_end, routing_debug=capacity.routing_debug
        )
        driver.rehasher = Rehasher(self.bus, capacity.block_tokens, lambda: self.namespace, on_failure)
        if self._stack is not None:
            assert self._host is not None
            self._attend_to(self._stack)
            driver.keeper = self._keeper = Keeper(
                self.bus,
                self._stack.store,
                self._host,
                self._arena,
                closing=self._closing,
                on_error=on_failure,
            )
        self.runner.on_failure = on_failure

    @property
    def store_pid(self) -> int:
        """Of the process that hosts the store; -1: there is none."""
        hosted = None if self._stack is None else self._stack.hosted
        return -1 if hosted is None else hosted.pid

    @property
    def store_problem(self) -> str:
        """Why the store is left alone; "" while it is used, and where there is none."""
        told = None if self._stack is None else self._stack.left_alone
        return "" if told is None else told.problem

    @property
    def refused_writes(self) -> tuple[int, str]:
        """Blocks that the store did not take, and why the latest were not."""
        return (0, "") if self._keeper is None else (self._keeper.refusals.blocks, self._keeper.refusals.problem)

    def share(self, close_transports: Callable[[], Awaitable[None]]) -> tuple[HostArena, AuxArena | None]:
        """Memory that other instances' blocks go to and come from, until `close_transports` has returned. Raises
        ConfigError where there is no host tier."""
        if self._host is None:
            raise ConfigError("config.host_blocks", "there is no host tier", hint="other instances read host blocks")
        self._transports = close_transports
        return self._host, self._arena

    async def _open_store(self) -> None:
        assert self._host is not None
        self._stack = StoreStack(
            self._config, self._registry, self.capacity, self._host, self._given_store, self._closing
        )
        regions = [self._host.region] + ([self._arena.region] if self._arena is not None else [])
        await self._stack.open(regions)

    def _attend_to(self, stack: StoreStack) -> None:
        """Publish what the store's wrappers tell; who subscribes later is told first that it is left alone."""
        stack.publish = self.bus.publish
        self.bus.standing = lambda: [] if stack.left_alone is None else [stack.left_alone]
        if stack.left_alone is not None:
            self.bus.publish(stack.left_alone)

    def _load_tokenizer(self) -> None:
        name = self.capacity.tokenizer if self._config.tokenizer == "auto" else self._config.tokenizer
        if self.tokenizer is None and name not in ("", "none"):
            factory = self._registry.load_tokenizer(name)
            try:
                self.tokenizer = factory(self._config.model)  # blocking: once, at start
            except FdasyncError:
                raise
            except Exception as error:
                problem = f"loading it failed: {type(error).__name__}: {error}"
                raise PluginError(TOKENIZERS, name, "", problem) from error
            self.long_texts = TokenizerProcess(name, self._config.model)

    async def wind_down(self, *, resume: bool = True) -> None:
        """Abort what is live and let steps in flight end, and what is on its way to the store get there.

        Args:
            resume: an engine that was paused goes on with its copies; False: its runner takes nothing more.

        Raises the runner's word for being overdue when that takes longer than the config's close_deadline_s, which
        counts from now for everything that closes.
        """
        assert self.driver is not None
        self._closing.begin()
        try:
            async with Within(self._closing.left_s):
                requests = self.hub.requests()
                keys = [sample.key for request in requests for sample in request.samples]
                if resume:
                    # in an engine that was paused, what is on its way to the store must go on
                    self.bus.publish(ResumeRequested())
                if keys:
                    self.bus.publish(AbortRequested(keys=tuple(keys)))
                    await asyncio.wait([request.done for request in requests])
                await self.driver.wait_idle()
        except TimeoutError:
            raise self.runner.overdue("the steps in flight at the close", self._closing.limit_s) from None
        if resume:
            await self._flush()

    async def _flush(self) -> None:
        """Let what is on its way to the store get there, by half-way to the deadline; what does not is dropped."""
        assert self.driver is not None
        scheduler = self.driver.scheduler
        if self._keeper is not None:
            try:
                async with Within(self._closing.left_s / 2):
                    await self.driver.wait_until(lambda: not scheduler.tiers.is_writing)
            except TimeoutError:
                # blocks in flight go with the store; a cache may lose what it was not told to be sure of
                return

    def fail(self, cause: BaseException) -> None:
        """No more turns; every live request ends with what it has."""
        assert self.driver is not None
        self.driver.stop()
        last: list[Action] = []
        if not self.driver.broken:
            try:
                last = self.driver.scheduler.salvage()
            except Exception as error:
                # whatever is wrong with the books, the callers must be told
                cause.add_note(f"while the requests so far were ended: {type(error).__name__}: {error}")
        self.hub.fail(cause, last)

    async def release(self) -> None:
        """Free everything, whatever `open` got to and whatever of it fails; idempotent.

        Raises what closing the runner raises, DeadlineExceeded if that takes too long.
        """
        if self.driver is not None:
            self.driver.stop()
            self.bus.close()
        self._closing.grant(_RELEASE_SHARE)
        limit_s = self._closing.limit_s
        # what has a process of its own keeps its deadline by itself, and is not cut off while it reaps it
        reaping_s = limit_s + _REAP_S
        # these read and write the arenas, on behalf of others too
        store: list[_Stage] = []
        if self._transports is not None:
            store.append(_Stage("closing the transports", self._transports, self._closing.left_s / 2))
        if self._keeper is not None:
            store.append(_Stage("letting go of blocks", self._keeper.aclose, reaping_s))
        if self._stack is not None:
            store.append(_Stage("closing the store", self._stack.aclose, reaping_s))
        runner_s = reaping_s if isinstance(self.runner, WorkerRunner) else limit_s
        others = [_Stage("closing the runner", self.runner.aclose, runner_s)]
        if self.driver is not None and self.driver.rehasher is not None:
            others.append(_Stage("ending the hashing", self.driver.rehasher.aclose, limit_s))
        if self.long_texts is not None:
            others.append(_Stage("closing the tokenizer's process", self.long_texts.aclose, reaping_s))
        first = await self._close_all([store, *[[stage] for stage in others]])
        # nobody touches the arenas any more
        for arena in (self._arena, self._host):
            if arena is not None:
                arena.close()
        if first is not None:
            raise first

    async def _close_all(self, lines: Sequence[Sequence[_Stage]]) -> BaseException | None:
        """Each line in order, all lines at the same time, so that nobody waits for another's deadline.

        The first error, with notes of the others.
        """
        errors: list[tuple[str, BaseException]] = []

        async def close(line: Sequence[_Stage]) -> None:
            for stage in line:
                try:
                    await to_its_end(stage.what, stage.run)
                except BaseException as error:
                    # the rest must go all the same
                    errors.append((stage.what, error))

        left = [line for line in lines if line]
        while left:
            tasks = {asyncio.ensure_future(close(line)): line for line in left}
            # each stage has its own deadline
            await to_its_end("closing", partial(asyncio.wait, tasks))
            # one that was cancelled before its first step has closed nothing
            left = [line for task, line in tasks.items() if task.cancelled()]
        if not errors:
            return None
        _, first = errors[0]
        for what, later in errors[1:]:
            first.add_note(f"and then, {what}: {type(later).__name__}: {later}")
        return first


async def to_its_end(what: str, work: Callable[[], Awaitable[object]]) -> None:
    """Await an ending; begin it again when this task is cancelled meanwhile, because what is half closed leaks.

    Args:
        what: what TaskCancelled calls it.
        work: may be begun again; what it waits for has its own deadlines.

    Raises what the work raises, and TaskCancelled where a task that the work waits for was cancelled.
    """
    mine = asyncio.current_task()
    assert mine is not None
    while True:
        try:
            await work()
            return
        except asyncio.CancelledError:
            if not mine.cancelling():
                raise TaskCancelled(what) from None
            while mine.cancelling():
                mine.uncancel()
