"""Serves Hugging Face mixture-of-experts checkpoints through transformers, with paged KV and exact routing.

The `Runner` of this plugin: what the contract asks of it is done by an `OpenedRunner` and its parts. An executor
performs steps and copies; on a CPU it computes where `launch` is called, so the runner belongs in a worker process.
Knows sequences by lane, blocks by id and slots by number; knows nothing of requests or text. Made by `make_runner` from
the entry point `transformers` of `fdasync.runners`.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fdasync.errors import ConfigError, FdasyncError, InvariantBroken, RunnerError, UnsupportedModel
from fdasync.ipc.remote import forwarding
from fdasync.runner.base import Capacity, Runner, RunnerLimits
from fdasync_transformers.capture.profiling import Profiling
from fdasync_transformers.execution.model_memory import DeviceMemory, ModelMemory
from fdasync_transformers.start.bound_runner import BoundRunner, bind
from fdasync_transformers.start.examine import examine
from fdasync_transformers.start.opened_runner import OpenedRunner, current
from fdasync_transformers.start.runner_config import (
    TransformersConfig,
    check_config,
    check_device,
    check_numerics,
    device_of,
)
from fdasync_transformers.start.stored import check_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    from transformers import PreTrainedModel

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.ipc.exchange import Exchange
    from fdasync.ipc.peers.blocks import PeerBlocks
    from fdasync.ipc.remote import Method
    from fdasync.request import Grammar, MemoryPart
    from fdasync.runner.base import CopyOutput, StepOutput
    from fdasync.runner.report import ModelReport

_NOT_BOUND = "the runner is closed, or not bound yet"


@forwarding(Runner)
class TransformersRunner(Runner):
    """One checkpoint and its paged KV cache; see `Runner` for the contract."""

    config_type: ClassVar[type[msgspec.Struct]] = TransformersConfig
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._exchange: Exchange | None = None
        self._profiling = Profiling()
        self._memory = ModelMemory(torch.device("cpu"))
        self._opened: OpenedRunner | None = None
        self._bound: BoundRunner | None = None

    @property
    def opened(self) -> OpenedRunner:
        """Raises InvariantBroken before `open`, and after the end."""
        if self._opened is None:
            raise InvariantBroken("the runner is not open yet, or closed")
        return self._opened

    @property
    def bound(self) -> BoundRunner:
        """Raises InvariantBroken before `bind`, and after the end."""
        if self._bound is None:
            raise InvariantBroken(_NOT_BOUND)
        return self._bound

    @property
    def model(self) -> PreTrainedModel:
        """The model that is served, for tools that watch its modules. Raises InvariantBroken as `opened` does."""
        return self.opened.model.step_model.model

    def examine(self) -> ModelReport:
        """As `Runner.examine`: builds the model on the meta device. Raises CheckpointError and ConfigError."""
        return examine(self.config, self.limits, self._checked())

    def join(self, exchange: Exchange) -> None:
        """As `Runner.join`: this process loads and computes its parts of the model."""
        seat, own = (exchange.rank, exchange.ranks), (self.limits.rank, self.limits.tensor_parallel)
        if seat != own:
            raise InvariantBroken("rank {} of {} for {} of {}".format(*seat, *own))
        self._exchange = exchange

    async def open(self) -> Capacity:
        """Load, mend, probe, check, size. Blocks its loop meanwhile.

        Raises CheckpointError, UnsupportedModel and ConfigError; checks the folder and the config before it takes much
        memory.
        """
        try:
            return self._open()
        except (FdasyncError, MemoryError):
            raise
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "model",
                f"its weights do not fit beside what is on the device: {error}",
                hint="see fdasync doctor --model",
            ) from error
        except Exception as error:
            # not the checkpoint's: reading it raises CheckpointError itself
            raise UnsupportedModel(self.limits.model, f"opening it fails: {type(error).__name__}: {error}") from error

    def _open(self) -> Capacity:
        device = self._checked()
        if (self.limits.tensor_parallel > 1) != (self._exchange is not None):
            raise InvariantBroken(f"{self.limits.tensor_parallel} ranks, and this one did not join them before open")
        with current(device):
            sleeps = device.type == "cuda" and self.config.sleep and not self.limits.shows_blocks
            self._memory = DeviceMemory(device) if sleeps else ModelMemory(device)
            self._opened = OpenedRunner(self.config, self.limits, self._exchange, self._memory)
        return self._opened.capacity

    def _checked(self) -> torch.device:
        """The device, once settings are checked that need no checkpoint, or its config alone."""
        config, limits = self.config, self.limits
        check_config(config, limits)
        device = device_of(config, limits)
        check_device(config, device)
        check_numerics(config, limits, device)
        check_stored(config, limits, device)
        return device

    async def bind(
        self,
        num_blocks: int,
        arena: AuxArena | None,
        host: HostArena | None = None,
        snapshots: HostArena | None = None,
    ) -> None:
        """As `Runner.bind`. Blocks its loop meanwhile. Raises ConfigError when the pool does not fit, or no graph can
        hold what the model does."""
        self._bound = await bind(self.opened, num_blocks, arena, host, snapshots)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """On a CPU the future is done on return, on a GPU when the device is done. A failure fails the runner too."""
        if self._bound is None:
            problem = _NOT_BOUND
        elif self.opened.weights.broken:
            problem = "no steps with weights of which only a part was replaced"
        elif self._bound.sleep.released:
            problem = "its memory is released"
        else:
            return self._bound.executor.launch(step)
        return _failed(RunnerError(problem, step.step_id))

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """As `launch`."""
        return _failed(RunnerError(_NOT_BOUND)) if self._bound is None else self._bound.executor.copy(copy)

    def peer_blocks(self) -> PeerBlocks | None:
        shown = self.opened.shown
        return None if shown is None else shown.rows

    async def check_grammar(self, grammar: Grammar) -> None:
        grammars, checks = self.opened.grammars, self.opened.checks
        if grammars is None or checks is None:
            return await super().check_grammar(grammar)
        # in a child process first: compiling it may take minutes
        await checks.check(grammar)
        await grammars.prepare(grammar)

    async def profile(self, parent: str, name: str, seconds: float) -> str:
        folder = Path(parent or tempfile.gettempdir(), name)
        return await self._profiling.record(folder, self.limits.rank, seconds, device_of(self.config, self.limits))

    async def release_memory(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """As `Runner.release_memory`; blocks. Graphs stay: what they hold are addresses, which stay too."""
        sleep = self.bound.sleep
        if "weights" in parts and not keep_weights:
            self.opened.weights.forget_weights()
        # a collected cycle may hold tensors
        gc.collect()
        with current(self.opened.device):
            sleep.release(parts, keep_weights=keep_weights)

    async def regain_memory(self, part: MemoryPart) -> None:
        with current(self.opened.device):
            self.bound.sleep.regain(part)

    async def forward(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What all other verbs of the contract do: the same method of a part; those of weights block."""
        answer = self.forward_now(method, args, kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    def forward_now(self, method: Method[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        parts = self.opened.groups, self.opened.lent, self.opened.weights
        verb = next(getattr(part, method.name) for part in parts if hasattr(part, method.name))
        return verb(*args, **kwargs)

    async def aclose(self) -> None:
        """Free model, KV, graphs and hooks; idempotent. Waits for the device's work, bounded."""
        opened, self._opened = self._opened, None
        bound, self._bound = self._bound, None
        memory, self._memory = self._memory, ModelMemory(torch.device("cpu"))
        if opened is None:
            memory.close()
            return
        opened.groups.close()
        try:
            if opened.checks is not None:
                await opened.checks.aclose()
            try:
                if opened.shown is not None:
                    await opened.shown.aclose()
            finally:
                if bound is not None:
                    await bound.executor.aclose()
        finally:
            dead = bound is not None and bound.executor.device_failed
            opened.model.step_model.aux.close()
            shown = opened.shown
            # nothing refers to the model when its memory is given back
            opened = bound = None
            if not dead:
                if shown is not None:
                    shown.free()
                memory.close()


def _failed(error: RunnerError) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future
