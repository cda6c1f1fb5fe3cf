"""One `fdasync serve` as a child: what it tells of itself when it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.cli.local.child import Child, Plan

from fdasync.engine.config import EngineConfig
from fdasync.ipc.deadlines import Within

if TYPE_CHECKING:
    from pathlib import Path

_START_S = 300.0


@pytest.fixture
def no_blocking() -> None:
    """A loop that starts a child blocks for the milliseconds of a fork; no engine is on it."""


async def test_a_child_takes_further_options_and_tells_the_port_that_it_got(tmp_path: Path) -> None:
    config = EngineConfig(
        runner="synthetic", runner_config={"num_blocks": 64}, process="inline", role="mixed", host_blocks=8
    )
    log = tmp_path / "log.jsonl"
    plan = Plan(name="m0", role="mixed", config=config, extra=("--json-log", str(log)))
    child = Child(plan, "tcp://127.0.0.1:0", lambda _child: None)
    try:
        async with Within(_START_S):
            await child.ready
        assert child.address.startswith("tcp://127.0.0.1:")
        assert int(child.address.rpartition(":")[2]) > 0
        assert log.exists()
    finally:
        await child.aclose()
