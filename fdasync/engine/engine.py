"""`Engine`: `async with Engine(config) as engine`, then `generate`, `complete`, `abort`, `drain`.

An engine owns one supervisor task, and through it everything that runs (`runtime.py`); `frontend.py` takes requests in.
A request's failure ends that request alone. A broken invariant, a failed step or a dead worker fails the engine: every
pending and later call raises `EngineFailed`, and the caller's own task is never cancelled (docs/design.md, section 2).
Knows no other instance. Called by embedders and `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from random import Random
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from msgspec.structs import replace

from fdasync.engine.config import EngineConfig
from fdasync.engine.frontend import Frontend
from fdasync.engine.prepare import Preparer
from fdasync.engine.runtime import Runtime, to_its_end
from fdasync.engine.stream import TokenStream
from fdasync.engine.weights.weights import Weights
from fdasync.errors import (
    BadInput,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineFailed,
    FdasyncError,
    RunnerError,
    TaskCancelled,
)
from fdasync.events.catalog import CacheResetRequested, EngineDied, LoopHeldUp
from fdasync.generator import Generation, Generator, Load
from fdasync.ipc.deadlines import Within
from fdasync.ipc.home_loop import check_loop
from fdasync.request import (
    ask_of,
    check_name,
    check_pause_mode,
    check_prefix,
    checked_profile_s,
    checked_sleep,
)
from fdasync.runner.facts import ModelFacts
from fdasync.runner.plugins import checkpoint_folder
from fdasync.stats import EngineStats, cut
from fdasync.telemetry.sight.recording.engine_sights import EngineSights
from fdasync.telemetry.sight.sight import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Unpack

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.cache.store.base import Store
    from fdasync.drafting import Drafter
    from fdasync.engine.driver import Attendant
    from fdasync.engine.output import OutputProcessor
    from fdasync.engine.request_state import RequestState
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.bus import EventBus
    from fdasync.events.trace import TraceRing
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.request import (
        Doing,
        GenerateOptions,
        MemoryPart,
        PauseMode,
        Prompt,
        SamplingParams,
        SleepMode,
        WakeTag,
        WeightsFingerprint,
        WeightsGroup,
        WeightSource,
    )
    from fdasync.result import Result
    from fdasync.runner.base import Capacity, Runner
    from fdasync.telemetry.sight.sight import Sight

# how long the files of a profile may take to be written: a second of a GPU is some megabytes
_WRITE_PROFILE_S = 120.0
_LATENESS_PERIOD_S = 0.1
# a loop that is late by so much makes an event
_HELD_UP_S = 0.05

EngineState = Literal["new", "starting", "running", "draining", "closing", "closed", "failed"]
_ENDS = ("draining", "closing", "closed", "failed")


class Shared(NamedTuple):
    """Parts of an engine that services for other instances work with.

    Attributes:
        bus: the engine's events.
        frontend: takes in requests that another instance prefills.
        processor: has the outputs of live requests.
        host: the host tier: blocks go from it to other instances, and come to it from them.
        arena: aux rows; None when capture is off.
        snapshots: places of recurrent states on the host; None for a model without such states.
        capacity, namespace: functions that return these of the weights in use.
        fail: ends the engine.
    """

    bus: EventBus
    frontend: Frontend
    processor: OutputProcessor
    host: HostArena
    arena: AuxArena | None
    snapshots: HostArena | None
    capacity: Callable[[], Capacity]
    namespace: Callable[[], bytes]
    fail: Callable[[BaseException], None]


P = ParamSpec("P")
T = TypeVar("T")


def _telling(
    verb: Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]]:
    """A verb whose work is a task, which may go on without its caller: the engine's failure counts as told if it is
    raised here, and not if only that task meets it."""

    @wraps(verb)
    async def told(self: Engine, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return await verb(self, *args, **options)
        except EngineFailed:
            self._inside().failure_seen = True
            raise

    return told


class Engine(Generator):
    """See the module.

    Attributes:
        config: checked, as given, but for a `model` that names a folder in other words.
        state: where the engine is in its life; "failed" and "closed" are final.

    Args:
        config: an EngineConfig, or a mapping of its keys. Raises ConfigError, PluginError or CheckpointError at once.
        runner: a runner object in the place of the configured one, used in this process (tests).
        tokenizer: a tokenizer object in the place of the configured one.
        store: a store object in the place of the configured one (the config must name one), used in this process. While
            another engine has it open, this one goes without (`EngineStats.store_problem`), or does not start where
            `store_required` is set.
        attendant: joins the engine to other instances; None: the engine has no other instances.
        drafter: a drafter object in the place of the configured one (the config must name one). It knows no sequence
            yet, and was made with `DrafterLimits.of` the configured numbers, or wider ones.

    `async with` starts it; it may be entered and left from different tasks through `start` and `aclose`. It belongs to
    the loop that it was started on: calls from another loop raise WrongLoop, unless they only read.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        store: Store | None = None,
        attendant: Attendant | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            if not isinstance(config, Mapping):
                raise ConfigError("config", f"an EngineConfig or a mapping is needed, not {type(config).__name__}")
            config = EngineConfig.from_mapping(config)
        config.validate()
        if runner is None:
            config = replace(config, model=checkpoint_folder(config.runner, config.model))
        self.config = config
        self.state: EngineState = "new"
        self._runtime = Runtime(config, runner, tokenizer, store, attendant, drafter)
        self._frontend: Frontend | None = None
        self._weights: Weights | None = None
        self._sights: EngineSights | None = None
        self._failure: BaseException | None = None
        self._attendant = attendant
        self._supervisor: asyncio.Task[None] | None = None
        self._close_told = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._late_max_s = 0.0

    # -- life ---------------------------------------------------------------------------------------

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.aclose()
        seen = self._frontend is not None and self._frontend.failure_seen
        if self._failure is not None and not seen and error is None:
            # a failure that no caller has got must not end in silence
            raise EngineFailed(self._failure)

    async def start(self) -> None:
        """Load, profile, check; returns when requests may come.

        Raises what the runner raises (CheckpointError, UnsupportedModel, ConfigError), WorkerDied, or
        DeadlineExceeded; then nothing is left behind. Raises ConfigError where another engine has the runner or drafter
        object that this one was given.
        """
        if self.state != "new":
            raise EngineClosed(self.state)
        self._runtime.claim()
        self.state = "starting"
        self._loop = loop = asyncio.get_running_loop()
        self._stop: asyncio.Event = asyncio.Event()
        started: asyncio.Future[None] = loop.create_future()
        # its error counts as read where no caller waits any more
        started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._supervisor = loop.create_task(self._supervise(started), name="fdasync-engine")
        try:
            # a supervisor that is cancelled before its first step never sets `started`
            await asyncio.wait([started, self._supervisor], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise EngineClosed("closed")
            try:
                started.result()  # of a future that is done
            except (ConfigError, CheckpointError) as error:
                # they say which setting or file is wrong; where this code noticed would stand above that
                raise error.with_traceback(None) from error.__cause__
        except BaseException:
            self._stop.set()
            # a second cancellation leaves the supervisor to end by itself; `aclose` raises what closing raised
            await asyncio.wait([self._supervisor])
            raise

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """The engine's life. Cancelling this task fails the engine: `asyncio.run` cancels all tasks at its end, and
        other tasks of the engine that end with this one may leave their callers without an answer."""
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
        except BaseException as error:
            # of one of the engine's tasks; a task that an interrupt ended has raised it already
            self._fail(_first_of(error))
        finally:
            await self._end(starting, started)

    async def _run(self) -> None:
        """Run until `_stop` is set; then let requests and steps end."""
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
        """Free everything, however far the start got; cannot be cancelled. Raises what closing raises."""
        starting.cancel()
        await to_its_end("starting", lambda: asyncio.wait([starting]))
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            self.state = "failed"
        if not started.done():
            started.set_exception(error or self._stopped())
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
        await runtime.open(self._fail, self._request_ended)
        preparer = Preparer(
            self.config, runtime.capacity, runtime.tokenizer, runtime.long_texts, rng, runtime.runner.check_grammar
        )
        check = partial(self._check_alive, draining_is_fine=True)
        self._weights = Weights(self.config, runtime, preparer, self._fail, check, self._weights_changed)
        self._frontend = Frontend(self.config, runtime, preparer, rng, self._check_admission)
        layers, now = runtime.capacity.moe_layer_ids, asyncio.get_running_loop().time()
        weights = self._weights.state
        self._sights = EngineSights(
            self.stats, lambda: (runtime.namespace, weights.version), lambda: runtime.picks, layers, now
        )

    def _request_ended(self, request: RequestState) -> None:
        self._inside().ended(request)
        if self._sights is not None:
            self._sights.ended(request.ended())

    def _weights_changed(self) -> None:
        if self._sights is not None:
            self._sights.weights_changed()
        if self._attendant is not None:
            self._attendant.weights_changed()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new requests and wait until the live ones ended; the engine stays open for `stats` and `aclose`.

        Raises DeadlineExceeded after `timeout_s` (default: the config's request_deadline_s), EngineFailed.
        """
        self._check_open(draining_is_fine=True)
        frontend = self._inside()
        limit_s: Any = self.config.request_deadline_s if timeout_s is None else timeout_s
        if not isinstance(limit_s, int | float) or not 0 <= limit_s <= 1e9:
            raise BadInput("timeout_s", f"{limit_s!r} is out of range", limit="0 to 1e9")
        self.state = "draining"
        try:
            async with Within(limit_s):
                while live := frontend.requests():
                    await asyncio.wait([request.done for request in live])
                    # ends free their ids before their readers run; one turn lets those read
                    await asyncio.sleep(0)
        except TimeoutError:
            raise DeadlineExceeded(f"draining {len(frontend.requests())} requests", limit_s) from None
        if self._failure is not None:
            frontend.failure_seen = True
            raise EngineFailed(self._failure)

    async def aclose(self) -> None:
        """Abort live requests, let steps in flight end, free everything; idempotent.

        Live requests return what they have; requests that wait for a place raise EngineClosed. Raises, once, what
        closing the runner raises; WrongLoop in another loop than that of `start`.
        """
        if self._supervisor is None:
            self.state = "closed"
            return
        if not self._supervisor.done():
            check_loop(self._loop, "engine")
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
        """Fail the engine: every waiting caller gets EngineFailed, then the supervisor frees everything."""
        if self._failure is not None:
            return
        self._failure = cause
        self.state = "failed"
        self._stop.set()
        if self._frontend is None:
            # it was still starting: `start` raises the error
            return
        frontend = self._frontend
        frontend.failure_seen = bool(frontend.requests())
        self._runtime.fail(cause)
        if self._attendant is not None:
            self._attendant.engine_failed()
        # no later turn of the driver feeds the taps
        bus = self._runtime.bus
        bus.publish(EngineDied(problem=f"{type(cause).__name__}: {cause}"))
        bus.feed_taps(bus.drain())

    def _stopped(self) -> EngineClosed | EngineFailed:
        """The error of a start that was stopped."""
        return EngineClosed("closed") if self._failure is None else EngineFailed(self._failure)

    def _inside(self) -> Frontend:
        if self._frontend is None:
            raise EngineClosed(self.state)
        return self._frontend

    def _check_open(self, draining_is_fine: bool = False) -> None:
        """As `_check_alive`, in a call of the program: the failure that it raises counts as seen."""
        try:
            self._check_alive(draining_is_fine)
        except EngineFailed:
            self._inside().failure_seen = True
            raise

    def _check_alive(self, draining_is_fine: bool = False) -> None:
        check_loop(self._loop, "engine")
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self.state != "running" and not (draining_is_fine and self.state == "draining"):
            raise EngineClosed(self.state)

    def _check_admission(self, draining_is_fine: bool) -> None:
        self._check_open(draining_is_fine)
        if self._weights is not None and self._weights.control.broken is not None:
            raise self._weights.control.broken

    async def _watch_lateness(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LATENESS_PERIOD_S)
            late_s = loop.time() - before - _LATENESS_PERIOD_S
            self._late_max_s = max(self._late_max_s, late_s)
            if self._sights is not None:
                self._sights.tick(loop.time())
            if late_s >= _HELD_UP_S:
                self._runtime.bus.publish(LoopHeldUp(seconds=late_s))

    # -- requests -----------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation[TokenStream]:
        """See `Generator.generate`.

        Entering waits for a place (`max_requests`) and for tokenising. It raises BadInput, DuplicateRequestId,
        EngineClosed, EngineFailed, TokenizerFailed, and DeadlineExceeded, WorkerDied or
        WorkerStuck of the process that tokenises long texts. Reading raises EngineFailed or DecodeFailed.
        """
        frontend, ask = self._inside(), ask_of(prompt, params, options, streams=True)
        return Generation(lambda: TokenStream.open(frontend, ask))

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Result:
        """See `Generator.complete`.

        Raises EngineFailed with `.partial` if the engine fails meanwhile, DecodeFailed likewise if its text cannot be
        made.
        """
        frontend, ask = self._inside(), ask_of(prompt, params, options, streams=False)
        async with Generation(lambda: TokenStream.open(frontend, ask)) as stream:
            return await stream.finished()

    def abort(self, request_id: str) -> bool:
        check_name(request_id)
        check_loop(self._loop, "engine")
        request = None if self._frontend is None else self._frontend.find(request_id)
        if request is None or self._frontend is None:
            return False
        self._frontend.abort(request)
        return True

    def abort_all(self, prefix: str = "") -> int:
        check_prefix(prefix)
        check_loop(self._loop, "engine")
        return 0 if self._frontend is None else self._frontend.abort_all(prefix)

    # -- weights --------------------------------------------------------------------------------------

    @_telling
    async def pause(self, mode: PauseMode = "in_place") -> None:
        """See `Generator.pause`. Cancelling takes the pause back, unless the engine was paused before. Requests that it
        ended stay ended; requests that it retracted start again.

        Raises EngineFailed if the steps in flight do not end by their deadline, EngineClosed.
        """
        changing = self.weights
        check_pause_mode(mode)
        if mode == "abort":
            self._check_open(draining_is_fine=True)
            # the scheduler ends those that it knows
            self._inside().abort_unprepared()
        await changing.pausing.pause(mode)

    @_telling
    async def resume(self) -> None:
        """See `Generator.resume`; during an update it goes on at its end.

        Raises WeightsBroken, EngineClosed, EngineFailed.
        """
        await self.weights.resume()

    @_telling
    async def sleep(
        self, level: Literal[0, 1, 2] = 1, mode: SleepMode = "keep", *, tags: Sequence[MemoryPart] | None = None
    ) -> None:
        """See `Generator.sleep`. If the caller is cancelled, it goes on to its end.

        Raises ConfigError where the runner cannot release its memory, and says why; UpdateUnderWay; WeightsBroken;
        EngineClosed; EngineFailed, also where blocks do not leave the device in the time of an update, or the runner
        fails: nobody knows then what its memory holds.
        """
        memory = self.weights.memory
        level, mode = checked_sleep(level, mode)
        if mode == "abort":
            self._check_open(draining_is_fine=True)
            # a sleep that is refused ends no request
            memory.check(level, mode, tags)
            # the scheduler ends those that it knows
            self._inside().abort_unprepared()
        await memory.sleep(level, mode, tags)

    @_telling
    async def wake(self, tags: Sequence[WakeTag] | None = None) -> Doing:
        """See `Generator.wake`. If the caller is cancelled, it goes on to its end.

        Weights that were dropped and that no update has brought since are loaded from the folder that they came from,
        if they came from one, once all memory is there. Raises WeightsRejected where it cannot be read any more (an
        update, or another wake, mends it), WeightsDiffer where it holds other weights now; UpdateUnderWay;
        EngineClosed; EngineFailed.
        """
        return await self.weights.memory.wake(tags)

    async def reset_cache(self) -> None:
        """See `Generator.reset_cache`. Cancelling stops the waiting only. Raises EngineClosed, EngineFailed."""
        self._inside()
        self._check_open(draining_is_fine=True)
        driver = self._runtime.driver
        assert driver is not None
        before = driver.scheduler.resets
        self._runtime.bus.publish(CacheResetRequested())
        # the next turn reads it
        await driver.wait_until(lambda: driver.scheduler.resets > before)
        self._check_open(draining_is_fine=True)

    @_telling
    async def update_weights(
        self,
        version: str | int | None,
        source: WeightSource,
        mode: Literal["abort", "keep"] = "abort",
        *,
        expected: str | WeightsFingerprint | None = None,
    ) -> None:
        """See `Generator.update_weights`. It pauses, lets steps end, loads, and goes on.

        Args:
            source: of tensors, names are as in the checkpoint or the model's state dict, dtypes numpy's names or
                "bfloat16", buffers C-contiguous. Names left out keep their values. Buffers are read until this returns.
                Tensors of a group are received by the workers, into the parameters themselves where these are whole
                and have their dtype; nothing of them passes through this process.

        Raises BadInput; WeightsRejected when the source does not fit (nothing has changed, the engine goes on);
        WeightsBroken when loading failed half-way, WeightsDiffer when the weights in place are not the expected ones
        (it stays paused and takes only this call or `aclose`);
        EngineFailed, EngineClosed. An update whose caller was cancelled reads the buffers until `stats().updating` is
        False.

        Where `version` is in use already, the folder's weights id (XXH3-128 over all tensor bytes, as loaded) is
        compared with that of the weights in use. That reads and hashes the whole folder, and no step runs meanwhile.
        """
        await self.weights.update(version, source, mode, expected=expected)

    @_telling
    async def join_weights_group(self, group: WeightsGroup) -> None:
        """See `Generator.join_weights_group`. Each worker takes a rank."""
        await self.weights.groups.join(group)

    @_telling
    async def leave_weights_group(self, name: str) -> None:
        """See `Generator.leave_weights_group`."""
        await self.weights.groups.leave(name)

    @_telling
    async def begin_weight_update(self, mode: Literal["abort", "keep"] = "keep") -> None:
        """See `Generator.begin_weight_update`. It ends by itself where nobody goes on with it for the deadline of an
        update (`EngineConfig.update_deadline_s`)."""
        await self.weights.parts.begin(mode)

    @_telling
    async def end_weight_update(
        self, version: str | int | None = None, *, expected: str | WeightsFingerprint | None = None
    ) -> None:
        """See `Generator.end_weight_update`."""
        await self.weights.parts.end(version, expected)

    @_telling
    async def abandon_weight_update(self) -> None:
        """See `Generator.abandon_weight_update`."""
        self.weights.parts.abandon()

    @_telling
    async def set_weight_version(self, version: str | int) -> None:
        """See `Generator.set_weight_version`. It takes effect at once: tokens of steps in flight have the new label."""
        self.weights.relabel(version)

    @_telling
    async def weights_fingerprint(self) -> str:
        """See `Generator.weights_fingerprint`. Raises EngineFailed too."""
        return await self.weights.fingerprint()

    @_telling
    async def profile(self, seconds: float) -> dict[str, str]:
        """See `Generator.profile`; of one engine, which is called "engine". Raises RunnerError where a file cannot be
        written, WorkerDied and EngineFailed too."""
        seconds = checked_profile_s(seconds)
        self._inside()
        self._check_open(draining_is_fine=True)
        limit_s = seconds + _WRITE_PROFILE_S
        name = f"fdasync-profile-{secrets.token_hex(4)}"
        try:
            async with Within(limit_s):
                return {"engine": await self._runtime.runner.profile(self.config.profile_folder, name, seconds)}
        except TimeoutError:
            raise DeadlineExceeded("profiling", limit_s) from None
        except FdasyncError:
            raise
        except Exception as error:
            raise RunnerError(f"profiling raised {type(error).__name__}: {error}") from error

    # -- other instances ------------------------------------------------------------------------------

    def share(self) -> Shared:
        """The parts that services for other instances work with (`fdasync.Instance`). The engine's attendant ends all
        copies from and to the arenas before these are freed.

        Raises EngineClosed before the start, ConfigError without a host tier.
        """
        frontend, runtime = self._inside(), self._runtime
        host, arena, snapshots = runtime.share()
        return Shared(
            runtime.bus,
            frontend,
            runtime.processor,
            host,
            arena,
            snapshots,
            lambda: runtime.capacity,
            lambda: runtime.namespace,
            self.fail,
        )

    def peer_blocks(self) -> PeerBlocks | None:
        """What copies blocks from device to device, for the same services; None where the runner shows none.

        Raises EngineClosed before the start.
        """
        self._inside()
        return self._runtime.runner.peer_blocks()

    @property
    def weights(self) -> Weights:
        """The object that changes weights and label, for services that know the order of versions among instances.
        Raises EngineClosed before the start."""
        self._inside()
        assert self._weights is not None
        return self._weights

    def fail(self, cause: BaseException) -> None:
        """Fail the engine because a service that belongs to it failed. Idempotent."""
        if self.state in ("running", "draining", "closing"):
            self._fail(cause)

    # -- looking in -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """The runner's capacity. Raises EngineClosed before the start."""
        self._inside()
        return self._runtime.capacity

    @property
    def bus(self) -> EventBus:
        """Subscribe to events: `async with engine.bus.subscribe(StepDone, limit=1024) as steps`."""
        self._inside()
        return self._runtime.bus

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: tokens in, tokens out. Raises EngineClosed before the start."""
        self._inside()
        return self._runtime.tokenizer

    @property
    def store_pid(self) -> int:
        """Process id of the store's own process; -1 where there is none (no store, or a store that never blocks)."""
        self._inside()
        return self._runtime.store_pid

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; () where the runner runs in this process."""
        self._inside()
        return self._runtime.worker_pids

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs that were placed (`EngineConfig.gpus`), by rank; () where none were."""
        self._inside()
        return tuple([gpu.name for gpu in self._runtime.gpus])

    def stats(self) -> EngineStats:
        """Gauges and counters, now. Raises EngineClosed before the start."""
        frontend, runtime = self._inside(), self._runtime
        driver, control = runtime.driver, self.weights.control
        assert driver is not None
        refused, why = runtime.refused_writes
        return EngineStats(
            state=self.state if self.state in _ENDS else control.doing,  # type: ignore[arg-type]  # one of `_ENDS`
            live=frontend.num_live,
            live_tokens=sum([len(one.tokens) for request in runtime.processor.requests() for one in request.samples]),
            waiting_for_place=frontend.num_waiting,
            steps_in_flight=driver.steps_in_flight,
            updating=control.updating,
            reloadable=bool(self.weights.state.sources),
            released=control.released,
            loop_late_max_s=self._late_max_s,
            refused_writes=refused,
            refused_why=cut(why),
            store_problem=cut(runtime.store_problem),
            scheduler=driver.scheduler.stats(),
            taps=runtime.taps.stats(),
        )

    def facts(self) -> ModelFacts:
        capacity, runtime = self.capacity, self._runtime
        return ModelFacts.of(
            capacity,
            eos_ids=tuple(sorted(capacity.eos_ids)),
            tokenizer=runtime.tokenizer_name,
            model_path=self.config.model,
            takes_text=runtime.tokenizer is not None,
            max_step_tokens=self.config.max_step_tokens,
            max_requests=self.config.max_requests,
            weight_version=self.weights.state.version,
        )

    def load(self) -> Load:
        if self._failure is not None:
            raise EngineFailed(self._failure)
        frontend, driver = self._inside(), self._runtime.driver
        assert driver is not None
        stats, size, doing = driver.scheduler.stats(), self._runtime.capacity.block_tokens, self.weights.control.doing
        return Load(
            running=stats.running,
            waiting=stats.waiting + frontend.num_waiting,
            live=len(frontend.requests()),
            used_tokens=stats.used_blocks * size,
            capacity_tokens=stats.num_blocks * size,
            doing=doing,
            paused=doing != "running",
            asleep=doing in ("asleep", "waking"),
            updating=self.weights.control.updating,
        )

    def sight(self, since: int = 0, *, past_picks: bool = True) -> Sight:
        """What the engine shows of itself, now; costs about 0.2 ms.

        Args:
            since: number of a `Moment`; only later ones are told.
            past_picks: with the tables of earlier weights.

        Raises EngineClosed before the start, and the error that ended it.
        """
        if self._failure is not None:
            raise EngineFailed(self._failure)
        self._inside()
        assert self._sights is not None
        return self._sights.sight(since, past_picks=past_picks)

    async def watch(self) -> tuple[Watched, ...]:
        """See `Generator.watch`: the engine alone. It waits for nothing."""
        seen = self.sight()
        role = self.config.role
        return (Watched(name="engine", role=role, address="", is_up=True, problem="", age_s=0.0, sight=seen),)

    def trace(self) -> TraceRing:
        """The latest turns. Raises ConfigError unless `trace_turns` is set."""
        if self._runtime.trace is None:
            raise ConfigError("config.trace_turns", "is 0: nothing was recorded")
        return self._runtime.trace

    def check(self) -> None:
        """Raise InvariantBroken unless the scheduler's state is consistent. For tests and idle time."""
        self._inside()
        assert self._runtime.driver is not None
        self._runtime.driver.scheduler.check()


def _first_of(error: BaseException) -> BaseException:
    """The error of the first task of a group that failed; another error itself."""
    return _first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
