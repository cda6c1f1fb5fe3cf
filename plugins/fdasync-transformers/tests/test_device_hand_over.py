"""Two instances with a real model: blocks go from one's KV memory to the other's, as one engine computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, Instance, SamplingParams, connect

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=10, temperature=0.0)
DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=7, n=2)


def config(folder: Path, **values: Any) -> EngineConfig:
    own = {"dtype": "float64", "device": "cpu", "num_threads": 1, "experts": "eager"}
    sizes = {"block_tokens": 4, "num_blocks": 200, "max_context_tokens": 64, "max_running": 3, "max_step_tokens": 32}
    return EngineConfig(model=str(folder), runner_config=own, process="inline", **{**sizes, **values})


async def answers(engine: Any) -> list[Any]:
    found: list[Any] = []
    for number in range(3):
        prompt = [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(20 + number)]]
        result = await engine.complete(prompt, DRAWN if number == 1 else PARAMS)
        for sample in result.samples:
            assert sample.routing is not None
            found.append((list(sample.token_ids), sample.routing.array.tolist()))
    return found


@pytest.mark.heavy("two engines and a device's memory between them, once")
async def test_what_a_decode_instance_reads_from_a_device_is_what_one_engine_computes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_checkpoint(folder, "qwen3_moe", 0)
    async with Engine(config(folder)) as engine:
        alone = await answers(engine)
    sides = [
        Instance(
            config(folder, role=role, host_blocks=16, leases=LEASES),
            listen=f"ipc://{tmp_path}/{role}",
            links=LINKS,
            transport="device",
        )
        for role in ("prefill", "decode")
    ]
    async with sides[0], sides[1], connect([side.address for side in sides], links=LINKS) as router:
        assert [side.notice for side in sides] == ["", ""]
        assert await answers(router) == alone
        for side in sides:
            driver = side.engine._runtime.driver
            assert driver is not None
            planner = driver.scheduler.swap_planner
            assert (planner.out_blocks, planner.in_blocks) == (0, 0), "blocks went by way of the host"
        assert sides[1].status().stats.scheduler.received_blocks > 10
