"""Where the trainers' sequences are played: an engine in this process, routers, and `fdasync http` as a process."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from fdasync.testing import oracle_of, synthetic_config

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainer_stage import Stage
from trainer_truth import Truth
from trainers_process import front

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

# blocks for all rollouts of a sequence: none is preempted
MODEL = {"step_s": 0.001, "vocab_size": 100, "block_tokens": 4, "num_blocks": 1024, "max_context_tokens": 1024}


@pytest.fixture
def stage_of(scene_of: Any, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Stage]]:
    """A server for one sequence, by where it is: "engine", "fleet" (a router over two instances), "router" (over a
    prefill and a decode one), or "process" (`fdasync http`, whose engine is a process of its own)."""

    @asynccontextmanager
    async def make(place: str, **config: Any) -> AsyncIterator[Stage]:
        async with AsyncExitStack() as stack:
            if place == "process":
                weights = tmp_path / "weights"
                weights.mkdir()
                engine = tmp_path / "engine.json"
                # a process is further away
                engine.write_text(json.dumps({"runner_config": {**MODEL, "step_s": 0.01}}))
                options = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
                url = await stack.enter_async_context(
                    front("--runner", "synthetic", "--config", str(engine), "--weights-root", str(weights), *options)
                )
                client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=300))
            else:
                scene = await stack.enter_async_context(scene_of(place, runner=MODEL, **config))
                weights, url, client = scene.weights, scene.url, scene.client
            stage = Stage(client, url, weights, Truth(oracle_of(synthetic_config(MODEL))), [])
            try:
                yield stage
            finally:
                for task in stage.tasks:
                    task.cancel()
                await asyncio.gather(*stage.tasks, return_exceptions=True)

    return make
