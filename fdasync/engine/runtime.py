"""Opens and releases the parts of an engine: runner, arenas, scheduler, driver, output, store, tokenizer, taps.

`open` makes all parts, or raises and leaves the parts so far to `release`. Decides nothing: `engine/engine.py`, which
makes it, says when.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync.cache.aux import ROUTING
from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.cache.picks import PickShape
from fdasync.cache.store.base import Store
from fdasync.cache.store.process.proxy import ProcessStore
from fdasync.engine.config import make_policy, resolve, with_state_every
from fdasync.engine.driver import Driver
from fdasync.engine.output import OutputProcessor
from fdasync.engine.prepare import Rehasher, namespace_of
from fdasync.engine.store_io import StoreIO
from fdasync.engine.store_stack import guarded_store
from fdasync.engine.tokenizer_process import TokenizerProcess
from fdasync.errors import ConfigError, DeadlineExceeded, FdasyncError, PluginError, RunnerError, TaskCancelled
from fdasync.events.bus import EventBus, check_subscription
from fdasync.events.catalog import AbortRequested, Event, ResumeRequested
from fdasync.events.tap import Tap, TapTasks
from fdasync.events.trace import TraceRing
from fdasync.ipc.deadlines import Closing, Within, wait_within
from fdasync.registry.mapping import struct_of
from fdasync.registry.registry import RUNNERS, STORES, TAPS, TOKENIZERS, Registry
from fdasync.runner.group.group import GroupRunner
from fdasync.runner.group.placement import Placement
from fdasync.runner.group.workers import WorkerGroup
from fdasync.runner.plugins import make_runner
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.scheduler import make_scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.cache.picks import PickTable
    from fdasync.cache.store.guard import GuardedStore
    from fdasync.drafting import Drafter
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.driver import Attendant
    from fdasync.engine.request_state import RequestState
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action
    from fdasync.ipc.gpus import Gpu
    from fdasync.runner.base import Capacity, Runner

# beyond the close deadline: for killing and reaping a process
_REAP_S = 15.0
# share of the close deadline that closing the parts gets where steps in flight took all of it
_RELEASE_SHARE = 0.25


class _Stage(NamedTuple):
    """One part to close: the words for that in an error, how to close it, and its limit in seconds."""

    what: str
    close: Callable[[], Awaitable[None]]
    limit_s: float

    async def run(self) -> None:
        """Raises what `close` raises, DeadlineExceeded at the limit."""
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
        capacity: of the runner, with the weights in use; set by `open`.
        update_limit_s: deadline of an update; set by `open`.
        bus, processor, driver: set by `open`.
        trace: set by `open` where the configuration asks for one.
        namespace: of the weights in use.
        runner: as given, or made as configured.
        tokenizer, long_texts: None means tokens in, tokens out.
        tokenizer_name: entry-point name of a tokenizer that was loaded; "" where none was.
        policy: says which requests go first, at the frontend and in the scheduler.
        taps: the taps that the configuration names.
        gpus: of the workers, by rank, as long as they are theirs; () where none are placed.
    """

    capacity: Capacity
    update_limit_s: float
    namespace: bytes
    bus: EventBus
    processor: OutputProcessor
    trace: TraceRing | None = None

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | None,
        tokenizer: Tokenizer | None,
        store: Store | None = None,
        attendant: Attendant | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_name = ""
        self.long_texts: TokenizerProcess | None = None
        self.driver: Driver | None = None
        self._config = config
        self._registry = Registry()
        self.policy = make_policy(config.policy, config.policy_config)
        self._drafter = self._make_drafter(drafter)
        self.taps = TapTasks({name: self._make_tap(name, keys) for name, keys in config.taps.items()})
        self._attendant = attendant
        self._placement = self._make_placement(runner)
        self.runner = runner or self._make_runner()
        self.store: GuardedStore | None = None
        self._store_io: StoreIO | None = None
        self._rehasher: Rehasher | None = None
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
                f"{type(store).__name__} may block, which would stop the engine's loop",
                hint="name it in config.store: then it runs in a process of its own",
            )
        if config.store and store is None:
            # found and not imported: `open` imports the class, to see whether it needs a process of its own
            self._registry.find(STORES, config.store)
        if tokenizer is None and config.tokenizer not in ("auto", "none"):
            self._registry.find(TOKENIZERS, config.tokenizer)
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None
        self._snapshots: HostArena | None = None

    def _make_drafter(self, given: Drafter | None) -> Drafter | None:
        config = self._config
        if config.speculation is not None:
            return config.speculation.drafter_for(given, depth=config.pipeline_depth, max_running=config.max_running)
        if given is not None:
            raise ConfigError("config.speculation", "is not set, and a drafter object was given", hint="give it a name")
        return None

    def _make_tap(self, name: str, keys: dict[str, Any]) -> Tap:
        """Raises PluginError; ConfigError naming the key."""
        # mypy refuses an abstract class here, as if it were instantiated
        tap = self._registry.load(TAPS, name, Tap)
        own = struct_of(tap.config_type, keys, error=ConfigError, root=f"config.taps.{name}")
        try:
            check_subscription(tap.kinds, tap.limit)
            return tap(own)
        except Exception as error:
            raise PluginError(TAPS, name, "", f"it cannot be made: {type(error).__name__}: {error}") from error

    def _make_placement(self, runner: Runner | None) -> Placement | None:
        config = self._config
        if runner is not None:
            if config.gpus != "auto":
                problem = "is set, and a runner object was given: it runs in this process"
                raise ConfigError("config.gpus", problem, hint="leave gpus out, or name the runner in config.runner")
            return None
        if not config.places_gpus:
            return None
        return Placement(config.gpus, config.tensor_parallel, shares=config.share_gpus, sees_all=self._shows_blocks)

    @property
    def _shows_blocks(self) -> bool:
        """Other instances of this machine copy blocks from the devices."""
        return self._attendant is not None and self._attendant.shows_blocks

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return () if self._placement is None else self._placement.gpus

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; () where the runner runs in this process."""
        return self.runner.pids if isinstance(self.runner, WorkerRunner | WorkerGroup) else ()

    def _place(self) -> None:
        """Take the GPUs. Raises ConfigError where another engine has one."""
        if self._placement is not None:
            assert isinstance(self.runner, WorkerRunner | WorkerGroup)
            self._placement.take()
            self.runner.place(self._placement.environments())

    def _make_runner(self) -> Runner:
        config = self._config
        limits = config.runner_limits()
        if self._shows_blocks:
            limits = msgspec.structs.replace(limits, shows_blocks=True)
        if config.process == "worker":
            # found and not imported: a runner's imports belong in its own process
            self._registry.find(RUNNERS, config.runner)
            if config.tensor_parallel > 1:
                return WorkerGroup(
                    config.runner,
                    config.runner_config,
                    limits,
                    close_deadline_s=config.close_deadline_s,
                    # the engine's own deadlines come first: they say which rank is behind
                    exchange_deadline_s=2
                    * max(config.start_deadline_s, config.step_deadline_s, config.update_limit_s(0.0)),
                )
            return WorkerRunner(config.runner, config.runner_config, limits, close_deadline_s=config.close_deadline_s)
        return make_runner(config.runner, config.runner_config, limits)

    def claim(self) -> None:
        """Take the objects that no two engines can share, until `release`. Raises ConfigError where one has them."""
        owned = {"runner": self.runner, "drafter": self._drafter}
        for name, one in owned.items():
            if one is not None and one.in_use:
                problem = f"{type(one).__name__} is used by another engine"
                raise ConfigError(name, problem, hint="give each engine an object of its own")
        self._mark(in_use=True)

    def _mark(self, *, in_use: bool) -> None:
        self.runner.in_use = in_use
        if self._drafter is not None:
            self._drafter.in_use = in_use

    async def open(self, on_failure: Callable[[BaseException], None], on_end: Callable[[RequestState], None]) -> None:
        """Load, profile, allocate, check. Raises what the runner raises, DeadlineExceeded, CheckpointError."""
        config = self._config
        loop = asyncio.get_running_loop()
        # before the store, which reports how it opens; the events wait for the driver
        self.bus = EventBus(loop.time, self._standing)
        self._place()
        began = loop.time()
        try:
            async with Within(config.start_deadline_s):
                self.capacity = capacity = with_state_every(config, await self.runner.open())
                self.update_limit_s = config.update_limit_s(loop.time() - began)
                _check_answer(config, capacity)
                self.namespace = namespace_of(capacity)
                scheduler = make_scheduler(resolve(config, capacity, self.namespace), self.policy, self._drafter)
                num_host_blocks = scheduler.config.num_host_blocks
                if capacity.aux_specs:
                    num_slots = capacity.num_blocks + num_host_blocks
                    self._arena = AuxArena.create(
                        num_slots, capacity.block_tokens, capacity.aux_specs, _picks_of(capacity)
                    )
                if num_host_blocks:
                    self._host = HostArena.create(num_host_blocks, capacity.block_nbytes)
                if scheduler.config.num_host_snapshots:
                    self._snapshots = HostArena.create(scheduler.config.num_host_snapshots, capacity.snapshot_nbytes)
                await self.runner.bind(capacity.num_blocks, self._arena, self._host, self._snapshots)
            if config.store:
                # under a deadline of its own: an engine can start without its store
                await self._open_store()
        except TimeoutError as error:
            if isinstance(error, FdasyncError):
                raise
            if isinstance(self.runner, GroupRunner):
                raise self.runner.overdue("starting the runner", config.start_deadline_s) from None
            raise DeadlineExceeded("starting the runner", config.start_deadline_s) from None
        except FdasyncError:
            raise
        except Exception as error:
            raise RunnerError(f"starting failed: {type(error).__name__}: {error}") from error
        self._load_tokenizer()
        if config.trace_turns:
            self.trace = TraceRing(scheduler.config, config.trace_turns)
        self.processor = OutputProcessor(self.bus, loop.time, self._arena, on_end, routing_debug=capacity.routing_debug)
        self._rehasher = Rehasher(self.bus, capacity.block_tokens, lambda: self.namespace, on_failure)
        if self.store is not None:
            assert self._host is not None
            self._store_io = StoreIO(
                self.bus, self.store, self._host, self._arena, self._snapshots, on_error=on_failure
            )
        self.driver = Driver(
            loop,
            self.bus,
            scheduler,
            self.runner,
            self.processor,
            self._rehasher,
            self._store_io,
            self._attendant,
            step_deadline_s=config.step_deadline_s,
            trace=self.trace,
            on_failure=on_failure,
        )
        self.taps.start(self.bus)
        # a registration: the runner is older than its engine
        self.runner.on_failure = on_failure

    @property
    def store_pid(self) -> int:
        """Process id of the store's own process; -1: there is none."""
        inner = None if self.store is None else self.store.inner
        return inner.pid if isinstance(inner, ProcessStore) else -1

    @property
    def picks(self) -> PickTable | None:
        """Counts of the experts that were chosen; None: nothing counts them."""
        return None if self._arena is None else self._arena.picks

    @property
    def store_problem(self) -> str:
        """Why the store is left alone; "" while it is used, and where there is none."""
        event = None if self.store is None else self.store.breaker.left_alone
        return "" if event is None else event.problem

    @property
    def refused_writes(self) -> tuple[int, str]:
        """How many blocks the store refused, and why it refused the latest."""
        return (0, "") if self._store_io is None else (self._store_io.refusals.blocks, self._store_io.refusals.problem)

    def share(self) -> tuple[HostArena, AuxArena | None, HostArena | None]:
        """The arenas of KV, rows and snapshots that transports copy from and to, until the attendant has closed these.
        Raises ConfigError where there is no host tier."""
        if self._host is None:
            raise ConfigError("config.host_blocks", "there is no host tier", hint="other instances read host blocks")
        return self._host, self._arena, self._snapshots

    async def _open_store(self) -> None:
        assert self._host is not None
        self.store = guarded_store(
            self._config, self.capacity, self._host, self._given_store, self._closing, self.bus.publish
        )
        arenas = (self._host, self._arena, self._snapshots)
        await self.store.open([arena.region for arena in arenas if arena is not None])

    def _standing(self) -> list[Event]:
        """What a later subscriber gets first: taps that failed, and that the store is left alone."""
        left_alone = None if self.store is None else self.store.breaker.left_alone
        return [*self.taps.failures.values(), *([] if left_alone is None else [left_alone])]

    def _load_tokenizer(self) -> None:
        name = self.capacity.tokenizer if self._config.tokenizer == "auto" else self._config.tokenizer
        if self.tokenizer is None and name not in ("", "none"):
            self.tokenizer_name = name
            factory = self._registry.load_function(TOKENIZERS, name)
            try:
                self.tokenizer = factory(self._config.model)  # blocking: once, at start
            except FdasyncError:
                raise
            except Exception as error:
                problem = f"loading it failed: {type(error).__name__}: {error}"
                raise PluginError(TOKENIZERS, name, "", problem) from error
            self.long_texts = TokenizerProcess(name, self._config.model)

    async def wind_down(self, *, resume: bool = True) -> None:
        """Abort live requests, and let steps in flight and writes to the store end.

        Args:
            resume: a paused engine goes on, so that its copies end; False: its runner takes no more work.

        Raises the runner's error for overdue work when that takes longer than the config's close_deadline_s, which
        counts from now for everything that closes.
        """
        assert self.driver is not None
        self._closing.begin()
        try:
            async with Within(self._closing.left_s):
                requests = self.processor.requests()
                keys = [sample.key for request in requests for sample in request.samples]
                if resume:
                    # writes to the store need copies, which a paused engine does not begin
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
        """Let writes to the store end, for half of the time to the deadline; later ones are dropped."""
        assert self.driver is not None
        scheduler = self.driver.scheduler
        if self._store_io is not None:
            try:
                async with Within(self._closing.left_s / 2):
                    await self.driver.wait_until(lambda: not scheduler.tiers.is_writing)
            except TimeoutError:
                # a cache may lose blocks; those in flight end with the store
                return

    def fail(self, cause: BaseException) -> None:
        """Stop the driver's turns and end every live request with what it has."""
        assert self.driver is not None
        self.driver.stop()
        last: list[Action] = []
        if not self.driver.broken:
            try:
                last = self.driver.scheduler.salvage()
            except Exception as error:
                # the callers must get their error, whatever is wrong with the scheduler's state
                cause.add_note(f"while the requests so far were ended: {type(error).__name__}: {error}")
        self.processor.fail(cause, last)

    async def release(self) -> None:
        """Free everything, however far `open` got, and whichever part fails to close; idempotent.

        Raises what closing the runner raises, DeadlineExceeded if that takes too long.
        """
        if self.driver is not None:
            self.driver.stop()
            self.bus.close()
        self._closing.grant(_RELEASE_SHARE)
        limit_s = self._closing.limit_s
        # a part with a process of its own keeps the deadline by itself, and must not be cut off while it reaps
        reaping_s = limit_s + _REAP_S
        # these read and write the arenas: one after the other, before the arenas are freed
        store: list[_Stage] = []
        if self._attendant is not None:
            close = self._attendant.close_transports
            store.append(_Stage("closing the transports", close, self._closing.left_s / 2))
        if self._store_io is not None:
            store.append(_Stage("ending transfers", self._store_io.aclose, reaping_s))
        if self.store is not None:
            store.append(_Stage("closing the store", self.store.aclose, reaping_s))
        runner_s = reaping_s if isinstance(self.runner, WorkerRunner | GroupRunner) else limit_s
        others = [
            _Stage("closing the runner", self.runner.aclose, runner_s),
            _Stage("ending the taps", partial(self.taps.aclose, limit_s, wait_within), reaping_s),
        ]
        if self._rehasher is not None:
            others.append(_Stage("ending the hashing", self._rehasher.aclose, limit_s))
        if self.long_texts is not None:
            others.append(_Stage("closing the tokenizer's process", self.long_texts.aclose, reaping_s))
        first = await self._close_all([store, *[[stage] for stage in others]])
        self._mark(in_use=False)
        if self._placement is not None:
            # the workers have ended
            self._placement.close()
        # nothing uses the arenas any more
        for arena in (self._arena, self._host, self._snapshots):
            if arena is not None:
                arena.close()
        if first is not None:
            raise first

    async def _close_all(self, lines: Sequence[Sequence[_Stage]]) -> BaseException | None:
        """Run each line in order, all lines at the same time, so that no part waits for another line's deadline.

        Returns the first error, with notes of the others.
        """
        errors: list[tuple[str, BaseException]] = []

        async def close(line: Sequence[_Stage]) -> None:
            for stage in line:
                try:
                    await to_its_end(stage.what, stage.run)
                except BaseException as error:
                    # the other stages run all the same
                    errors.append((stage.what, error))

        left = [line for line in lines if line]
        while left:
            tasks = {asyncio.ensure_future(close(line)): line for line in left}
            # each stage has its own deadline
            await to_its_end("closing", partial(asyncio.wait, tasks))
            # a task that was cancelled before its first step has closed nothing
            left = [line for task, line in tasks.items() if task.cancelled()]
        if not errors:
            return None
        _, first = errors[0]
        for what, later in errors[1:]:
            first.add_note(f"and then, {what}: {type(later).__name__}: {later}")
        return first


async def to_its_end(what: str, work: Callable[[], Awaitable[object]]) -> None:
    """Await an ending; begin it again when this task is cancelled meanwhile: a half-closed part leaks.

    Args:
        what: what TaskCancelled calls it.
        work: may be begun again; keeps its own deadlines.

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


def _check_answer(config: EngineConfig, capacity: Capacity) -> None:
    """Raise ConfigError where the runner does not do what the configuration asks of its computation."""
    speculation = config.speculation
    if speculation is not None and capacity.max_run_tokens != 1 + speculation.max_tokens:
        raise ConfigError(
            "config.speculation",
            f"asks for {speculation.max_tokens} drafts of a sequence in a step, and runner {config.runner!r} gives"
            f" {capacity.max_run_tokens} tokens of one at most",
            limit=f"Capacity.max_run_tokens of {1 + speculation.max_tokens}",
            hint="leave config.speculation out, or take a runner that verifies drafts of this model",
        )
    if speculation is not None and not speculation.host_drafter and not capacity.drafter:
        raise ConfigError(
            "config.speculation.drafter",
            f"is {speculation.drafter!r}, and runner {config.runner!r} drafts nothing by itself",
            hint="name a drafter, or have the runner draft (runner_config.mtp of the transformers runner)",
        )
    if capacity.routing_debug != config.routing_debug:
        raise ConfigError("config.routing_debug", f"runner {config.runner!r} does not know it, or no routing")
    if capacity.tensor_parallel != config.tensor_parallel:
        raise ConfigError(
            "config.tensor_parallel",
            f"is {config.tensor_parallel}, and runner {config.runner!r} answers {capacity.tensor_parallel}",
            hint="set tensor_parallel to 1, or take a runner that computes in groups (Runner.join)",
        )
    if config.numerics == "fixed" and capacity.numerics != "fixed":
        raise ConfigError(
            "config.numerics",
            f"is 'fixed', and runner {config.runner!r} promises {capacity.numerics!r} numerics for this model",
            hint="set numerics to 'default', or take a runner that answers 'fixed' (Capacity.numerics)",
        )
    if capacity.sum_slices != config.sum_slices:
        raise ConfigError(
            "config.sum_slices",
            f"is {config.sum_slices}, and runner {config.runner!r} answers {capacity.sum_slices}",
            hint="set sum_slices to 1, or take a runner that sums in slices (Capacity.sum_slices)",
        )


def _picks_of(capacity: Capacity) -> PickShape | None:
    """What rows of routing mean; None: there is none, or rows name positions."""
    spec = next((spec for spec in capacity.aux_specs if spec.name == ROUTING), None)
    if spec is None or capacity.routing_debug or not capacity.num_experts:
        return None
    layers, top_k = spec.shape
    return PickShape(layers, top_k, capacity.num_experts, capacity.top_k_by_layer)
