"""What performs a runner's steps and copies once the model is there: on the host's clock, or on a device's.

`runner.py` opens a checkpoint and hands it to one of the two: `host_executor.py` computes where it is called (CPUs),
`device_executor.py` queues work and lets its end become a future (GPUs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.runner.base import StepOutput

if TYPE_CHECKING:
    import asyncio

    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut
    from fdasync.runner.base import CopyOutput
    from fdasync.runner.input_batch import LaneTable
    from fdasync_transformers.capture import RoutingCapture
    from fdasync_transformers.kv import KVPool
    from fdasync_transformers.sampler import SampleOutput


@dataclass(frozen=True)
class Bound:
    """What an executor works on.

    Attributes:
        pool: the KV.
        table: the lanes.
        arena: where rows go; None: capture is off.
        host: the host tier, or None.
        capture: hooks on the model, or None.
        vocab_size: logits past it are not of tokens.
        logits_dtype: torch's name of what sampling works in.
    """

    pool: KVPool
    table: LaneTable
    arena: AuxArena | None
    host: HostArena | None
    capture: RoutingCapture | None
    vocab_size: int
    logits_dtype: str


def step_output(step_id: int, sampled: SampleOutput) -> StepOutput:
    """What was sampled, as a runner gives it."""
    return StepOutput(
        step_id,
        tuple(sampled.tokens),
        None if sampled.raw is None else tuple(sampled.raw),
        None if sampled.processed is None else tuple(sampled.processed),
        None if sampled.top is None else tuple(sampled.top),
    )


class Executor(ABC):
    """Performs steps and copies; see `Runner.launch` and `Runner.copy` for what holds of their futures."""

    @abstractmethod
    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        """Start a step. Never raises: a failure ends the future, and every later one."""

    @abstractmethod
    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        """Start a copy. Never raises: a failure ends the future, and every later one."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait, bounded, for what is under way; take nothing more."""
