"""What ends, and what does not: actors and their children, blocked drivers, fleets in front of HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner
from ray_fleets import PARAMS, PROMPT, SOON_S, Load, parent_of, runs, until_gone, weights

from fdasync import SamplingParams
from fdasync.errors import ConfigError

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.50'")

from fdasync_ray import FleetConfig, RayFleet, attach  # noqa: E402 - behind the skip
from fdasync_ray.command import ray as command  # noqa: E402

pytestmark = [
    # of Ray's own code
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def test_an_instance_dies_with_its_actor_and_another_takes_its_place(cluster, engine_of):
    async with RayFleet(FleetConfig(engine=engine_of(step_s=0.005), mixed=2)) as fleet, fleet.router() as router:
        load = Load(router, 4)
        first = (await fleet.members())[0]
        actor = parent_of(first.pid)
        assert actor != os.getpid()
        os.kill(actor, signal.SIGKILL)
        await until_gone([first.pid])

        def replaced(view: Any) -> Any:
            return view if {one.pid for one in view.members if one.name == first.name} - {first.pid} else None

        await fleet.until(replaced, "the instance to be replaced", SOON_S)
        assert await load.end() > 4


async def test_instances_that_join_while_weights_change_have_the_last_ones(cluster, engine_of):
    async with RayFleet(FleetConfig(engine=engine_of(step_s=0.001), mixed=1)) as fleet:
        growing = asyncio.create_task(fleet.scale(mixed=5))
        version = 0
        while not growing.done():
            version += 1
            # a router that ends with its update, as a trainer's may
            async with fleet.router() as router:
                await fleet.update_weights(router, version, weights(version))
        await growing
        assert version > 1
        async with fleet.router() as router:
            members = await fleet.members()
            assert len(members) == 5
            told = []
            for one in members:
                result = await router.complete(PROMPT, PARAMS, decoders=[one.address])
                told.append((list(result.samples[0].token_ids), str(result.samples[0].weight_version[-1].version)))
            assert [one for one in told if one != told[0]] == []
            assert told[0][1] == str(version)


@pytest.mark.nightly
async def test_a_driver_that_is_busy_for_long_loses_no_instance(cluster, engine_of):
    lines: list[str] = []
    async with RayFleet(FleetConfig(engine=engine_of(), mixed=3), lines.append) as fleet:
        before = await fleet.members()
        lines.clear()
        await asyncio.sleep(0.5)
        time.sleep(20)  # noqa: ASYNC251 - a trainer's step
        await asyncio.sleep(5)
        assert await fleet.members() == before
        assert lines == []


class Front:
    """An actor with a router, in front of HTTP clients."""

    async def serve(self, name: str) -> str:
        from fdasync_http import HttpConfig, app
        from fdasync_http.server import Listen, serving

        self._router = attach(name).router()
        router = await self._router.__aenter__()
        self._server = serving(app(router, HttpConfig()), Listen(port=0, drain_s=5))
        return (await self._server.__aenter__()).url

    async def close(self) -> None:
        await self._server.__aexit__(None, None, None)
        await self._router.__aexit__(None, None, None)


async def test_an_actor_serves_http_in_front_of_the_fleet(cluster, engine_of):
    httpx2 = pytest.importorskip("httpx2")
    async with RayFleet(FleetConfig(engine=engine_of(), prefill=1, decode=1)) as fleet:
        front = ray.remote(Front).options(num_cpus=0).remote()
        url = await front.serve.remote("fleet")
        asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        async with httpx2.AsyncClient(timeout=300) as client:
            answer = await client.post(f"{url}/generate", json=asked)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["output_ids"]) == 8
            # it follows the fleet
            await fleet.scale(decode=2)
            assert (await client.post(f"{url}/generate", json=asked)).json()["output_ids"] == answer.json()[
                "output_ids"
            ]
        await front.close.remote()
        pids = [one.pid for one in await fleet.members()]
        ray.kill(front)
        assert all(runs(pid) for pid in pids)
    await until_gone(pids)


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("nonsense", "nonsense")]
)
def test_the_command_names_a_cluster_that_does_not_answer(address, words):
    done = CliRunner().invoke(command, ["up", "--mixed", "1", "--runner", "synthetic", "--address", address])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert "ray start --head" in str(done.exception)


@pytest.mark.nightly
async def test_the_second_signal_ends_the_command_at_once(cluster, tmp_path):
    config = tmp_path / "engine.json"
    shape = {"vocab_size": 128, "num_blocks": 256, "max_context_tokens": 1024, "step_s": 0.1}
    config.write_text(json.dumps({"runner_config": shape}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from fdasync_ray.command import ray; ray()", "up", "--mixed", "2"),
        *("--address", cluster.address, "--runner", "synthetic", "--config", str(config), "--name", "cut"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []

        async def until_line(words: str) -> None:
            async with asyncio.timeout(SOON_S):
                while not lines or words not in lines[-1]:
                    lines.append((await process.stdout.readline()).decode())
                    assert lines[-1], lines

        await until_line("ready; find it")
        # how far it is
        for number in range(2):
            assert [line for line in lines if f"m{number} (mixed) loads on node" in line]
            assert [line for line in lines if f"m{number} (mixed) is ready at tcp://" in line]
        client = attach("cut")
        pids = [one.pid for one in await client.members()]
        async with client.router() as router:
            asked = SamplingParams(max_tokens=900)
            calls = [asyncio.create_task(router.complete([number, 3], asked)) for number in range(2, 6)]
            async with asyncio.timeout(SOON_S):
                while not sum(one.status.stats.scheduler.running for one in router.stats().instances if one.status):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            await until_line("draining; another signal ends all at once")
            process.send_signal(signal.SIGTERM)
            await until_line("requests were cut short")
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert [one for one in results if not isinstance(one, Exception) and one.finish_reason == "length"] == []
        async with asyncio.timeout(SOON_S):
            await process.communicate()
        assert process.returncode == 1
        await until_gone(pids)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
