"""An engine that callers meet on. See `meetings.py`. Called by `tests/engine/test_control_meetings.py`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from fdasync import Engine
from fdasync.testing import FaultRunner, PassModel, check_idle, check_sample, oracle_of, synthetic_config
from tests.support.broadcast_runner import GROUP, runner_of
from tests.support.weights_play.explained import State
from tests.support.weights_play.meetings import PARAMS, PROMPT, UPDATE_S, Stage
from tests.support.weights_play.play import FIRST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fdasync import Sample


class EngineStage(Stage):
    """See the module."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        config = synthetic_config(
            {"step_s": 0.01, "copy_s": 0.003, "load_s": 0.05, "sleep_s": 0.05, "num_blocks": 32, "weights_id": FIRST},
            model=str(root / f"w-{FIRST}"), max_running=4, update_deadline_s=UPDATE_S, request_deadline_s=3600.0,
            seed=1,
        )  # fmt: skip
        self._inner = runner_of(config)
        self._passes = PassModel(4, FIRST)
        runner = FaultRunner(
            self._inner, Random(1), on_launch=self._passes.launched, on_copied=self._passes.copied,
            on_weights=lambda: self._passes.new_weights(self._inner.weights_id),
        )  # fmt: skip
        self._engine = Engine(config, runner=runner)
        self._oracle = oracle_of(config)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        async with self._engine:
            yield self._engine

    def state(self) -> State:
        self._engine.check()
        return state_of(self._engine, self._inner.weights_id, joined=GROUP.name in self._inner.groups)

    def check(self, sample: Sample) -> None:
        check_sample(sample, PROMPT, PARAMS, self._oracle, seen=self._passes.seen.get((PARAMS.seed, 0), []))

    def check_idle(self) -> None:
        check_idle(self._engine)


def state_of(engine: Engine, weights: int, *, joined: bool) -> State:
    """What one engine says. `weights`: number of the runner's."""
    load, stats = engine.load(), engine.stats()
    return State(
        doing=load.doing,
        paused=stats.scheduler.paused,
        asleep=load.asleep,
        released=frozenset(stats.released),
        version=engine.facts().weight_version,
        weights=weights if load.doing in ("running", "paused") else None,
        joined=joined,
    )
