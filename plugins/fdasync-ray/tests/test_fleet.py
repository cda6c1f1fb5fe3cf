"""A fleet on a real cluster: placed, found, updated from memory, healed and scaled while it serves."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_fleets import PARAMS, PROMPT, SOON_S, WHOLE_S, Load, until_gone, until_used, weights

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.50'")

from fdasync_ray import FleetConfig, RayFleet, attach  # noqa: E402 - behind the skip
from fdasync_ray.weights import packed  # noqa: E402

pytestmark = [
    # of Ray's own code
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def test_a_node_killed_under_load_costs_retries_only_and_its_instance_comes_back(cluster, engine_of):
    config = FleetConfig(engine=engine_of(step_s=0.005), prefill=1, decode=3, name="killed")
    async with RayFleet(config) as fleet, fleet.router() as router:
        members = await fleet.members()
        assert [one.name for one in members] == ["d0", "d1", "d2", "p0"]
        assert len({one.node for one in members}) == 3, "two on one node while another has none"
        await fleet.update_weights(router, 5, weights(77))
        told = await router.complete(PROMPT, PARAMS)
        load = Load(router, 6)
        victim = next(one for one in members if one.name == "d1")
        (node,) = [one for one in cluster.worker_nodes if one.node_id == victim.node]
        began = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)

        lost = {one.pid for one in members if one.node == victim.node}

        def replaced(view: Any) -> Any:
            now = [one for one in view.members if one.pid not in lost]
            return now if len(now) == 4 else None

        now = await fleet.until(replaced, "the fleet to be whole", WHOLE_S)
        assert time.monotonic() - began < WHOLE_S
        print(f"whole again after {time.monotonic() - began:.1f} s")
        assert victim.node not in {one.node for one in now}
        # every request ended whole: what the dead node had was sent again
        assert await load.end() > 6
        # by the new instance alone, with the weights that it was started without
        address = next(one.address for one in now if one.name == "d1")
        await until_used(router, address)
        again = await router.complete(PROMPT, PARAMS, decoders=[address])
        assert again.samples[0].token_ids == told.samples[0].token_ids
        assert router.stats().dropped == ()
        await until_gone(list(lost))
        cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80 << 20)


async def test_it_scales_while_it_serves_and_an_actor_of_another_process_finds_and_updates_it(cluster, engine_of):
    async with RayFleet(FleetConfig(engine=engine_of(step_s=0.005), mixed=1, name="scaled")) as fleet:
        async with fleet.router() as router:
            load = Load(router, 4)
            (first,) = await fleet.members()
            await fleet.scale(mixed=3)
            three = await fleet.members()
            assert len(three) == 3
            assert len({one.node for one in three}) == 3
            for one in three:
                await until_used(router, one.address)
            await fleet.scale(mixed=1)
            assert await fleet.members() == (first,)
            # none was cut short: each request of the load says so
            assert await load.end() > 4
        before, after, version = await ray.remote(Trainer).options(num_cpus=0).remote().update.remote("scaled", 99)
        assert before != after
        assert version == "9"
        view = await fleet.view()
        assert view.current is not None
        assert view.current.version == "9"


def test_a_node_has_one_copy_of_an_object_whoever_reads_it(cluster):
    values = np.arange(1 << 18, dtype=np.float32)
    read = ray.get(ray.put(packed([("a", "float32", values.shape, values)])))
    (data,) = read.data
    assert (data.view(np.float32) == values).all()
    assert not data.flags.owndata
    assert not data.flags.writeable


@pytest.mark.nightly
async def test_the_command_drains_at_a_signal_and_leaves_nothing_when_it_is_killed(cluster, tmp_path):
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"runner_config": {"vocab_size": 128, "num_blocks": 256, "max_context_tokens": 512}}))
    for number in (signal.SIGINT, signal.SIGKILL):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from fdasync_ray.command import ray; ray()", "up", "--mixed", "2"),
            *("--address", cluster.address, "--runner", "synthetic", "--config", str(config), "--name", "commanded"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            lines = []
            async with asyncio.timeout(SOON_S):
                while not lines or "ready; find it" not in lines[-1]:
                    lines.append((await process.stdout.readline()).decode())
                    assert lines[-1], lines
            client = attach("commanded")
            async with client.router() as router:
                assert (await router.complete(PROMPT, PARAMS)).samples[0].finish_reason == "length"
            pids = [one.pid for one in await client.members()]
            assert len(pids) == 2
            process.send_signal(number)
            async with asyncio.timeout(SOON_S):
                said, _ = await process.communicate()
            await until_gone(pids)
            if number == signal.SIGINT:
                assert process.returncode == 0
                assert b"all drained" in said
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.nightly
def test_the_example_runs(loopback):
    example = Path(__file__).parents[3] / "examples" / "rl_on_ray.py"
    done = subprocess.run(
        [sys.executable, str(example), "--steps", "2"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step \d: 16 samples of version (\d),", done.stdout, re.MULTILINE) == ["0", "1"], done.stdout


class Trainer:
    """Lives in another process: a router of its own, and weights from its memory."""

    async def update(self, name: str, number: int) -> tuple[Any, Any, str]:
        client = attach(name)
        async with client.router() as router:
            before = await router.complete(PROMPT, PARAMS)
            await client.update_weights(router, 9, weights(number))
            after = await router.complete(PROMPT, PARAMS)
            version = router.facts().weight_version
        return list(before.samples[0].token_ids), list(after.samples[0].token_ids), str(version)
