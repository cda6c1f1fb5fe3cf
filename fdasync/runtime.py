"""What a running engine is made of: runner, arena, scheduler, driver, output, tokenizer; opened and released.

Built by `engine.py`, which decides when; nothing here decides anything. `open` either gives a whole runtime
or leaves what `release` frees.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.cache.arena import AuxArena
from fdasync.config import resolve
from fdasync.driver import Driver
from fdasync.errors import DeadlineExceeded, FdasyncError, PluginError, RunnerError
from fdasync.events.catalog import AbortRequested
from fdasync.events.trace import TraceRing
from fdasync.output import OutputHub
from fdasync.registry import RUNNERS, TOKENIZERS, Registry
from fdasync.runner.worker import WorkerRunner
from fdasync.scheduler import Scheduler
from fdasync.tokenise import TokenizerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.actions import Action
    from fdasync.config import EngineConfig
    from fdasync.events.bus import EventBus
    from fdasync.output import RequestOutput
    from fdasync.runner.base import Capacity, Runner
    from fdasync.tokenizer import Tokenizer

# beyond the close deadline itself: killing and reaping a worker
_REAP_S = 15.0


class Runtime:
    """The parts of one engine.

    Attributes:
        capacity, driver, hub, bus, trace: there once `open` returned.
        tokenizer, long_texts: None means tokens in, tokens out.
    """

    capacity: Capacity
    hub: OutputHub
    trace: TraceRing | None = None

    def __init__(self, config: EngineConfig, runner: Runner | None, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.long_texts: TokenizerProcess | None = None
        self.driver: Driver | None = None
        self._config = config
        self._registry = Registry()
        self._runner = runner or self._make_runner()
        if tokenizer is None and config.tokenizer not in ("auto", "none"):
            self._registry.find(TOKENIZERS, config.tokenizer)
        self._arena: AuxArena | None = None

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
            async with asyncio.timeout(config.start_deadline_s):
                self.capacity = capacity = await self._runner.open()
                scheduler = Scheduler(resolve(config, capacity))
                if capacity.aux_specs:
                    self._arena = AuxArena.create(capacity.num_blocks, capacity.block_tokens, capacity.aux_specs)
                await self._runner.bind(capacity.num_blocks, self._arena)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
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
        self.driver = Driver(
            loop,
            scheduler,
            self._runner,
            step_deadline_s=config.step_deadline_s,
            trace=self.trace,
            on_failure=on_failure,
        )
        self.hub = self.driver.output = OutputHub(self.bus, loop.time, self._arena, on_end)
        self._runner.on_failure = on_failure

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

    async def wind_down(self) -> None:
        """Abort what is live and let steps in flight end.

        Raises the runner's word for being overdue when that takes longer than the config's close_deadline_s.
        """
        assert self.driver is not None
        deadline_s = self._config.close_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                requests = self.hub.requests()
                keys = [sample.key for request in requests for sample in request.samples]
                if keys:
                    self.bus.publish(AbortRequested(keys=tuple(keys)))
                    await asyncio.wait([request.done for request in requests])
                await self.driver.wait_idle()
        except TimeoutError:
            raise self._runner.overdue("the steps in flight at the close", deadline_s) from None

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
        limit_s = 2 * self._config.close_deadline_s + _REAP_S
        try:
            async with asyncio.timeout(limit_s):
                await self._runner.aclose()
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded("closing the runner", limit_s) from None
        finally:
            try:
                if self.long_texts is not None:
                    await self.long_texts.aclose()
            finally:
                if self._arena is not None:
                    self._arena.close()
