"""Random schedules of updates, pauses, sleeps and wakes through a router, over two instances in virtual time: after all
is undone every request has ended, with the tokens and rows of one version of the weights."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport

from fdasync import Instance, Router, RouterConfig, SamplingParams
from fdasync.errors import FdasyncError
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config
from tests.support.broadcast_runner import runner_of
from tests.support.weights_play.play import FIRST, NUMBERS, write_folders

if TYPE_CHECKING:
    from pathlib import Path

COSTS = {"step_s": 0.01, "load_s": 0.05, "sleep_s": 0.05, "weights_id": FIRST, "pass_stamp": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return root


async def play(seed: int, root: Path, said: list[str]) -> None:
    random, network, fabric = Random(seed), SimNetwork(Random(seed)), SimFabric(Random(seed))
    numbers = {"0": FIRST}
    async with AsyncExitStack() as stack:
        instances, runners = [], []
        for name in ("m0", "m1"):
            config = synthetic_config(
                COSTS, role="mixed", host_blocks=32, model=str(root / f"w-{FIRST}"), request_deadline_s=600.0
            )
            runners.append(runner_of(config))
            instance = Instance(
                config, listen=f"ipc:///run/{name}", name=name, wire=network.wire(name),
                transports=[SimTransport(fabric)], runner=runners[-1],
            )  # fmt: skip
            instances.append(await stack.enter_async_context(instance))
        router = Router(
            [one.address for one in instances], RouterConfig(request_deadline_s=600.0),
            wire=network.wire("router"), seed=seed,
        )  # fmt: skip
        await stack.enter_async_context(router)

        async def client(number: int) -> None:
            await asyncio.sleep(random.uniform(0, 3))
            params = SamplingParams(max_tokens=random.randint(1, 20), temperature=1.0, seed=number)
            prompt = [number, *range(random.randint(4, 30))]
            (sample,) = (await router.complete(prompt, params)).samples
            versions = {span.version for span in sample.weight_version} or {"0"}
            assert len(versions) == 1, versions
            config = msgspec.structs.replace(oracle_of(instances[0].engine.config).config)
            oracle = Oracle(msgspec.structs.replace(config, weights_id=numbers[versions.pop()]))
            check_sample(sample, prompt, params, oracle)

        async def update(name: str) -> None:
            label = str(int(router.facts().weight_version) + 1)
            while label in numbers:
                label = str(int(label) + 1)
            numbers[label] = int(name.split("-")[-1])
            try:
                await router.update_weights(label, str(root / name), "abort")
            except FdasyncError:
                del numbers[label]
                raise

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        for _ in range(12):
            held = numbers[router.facts().weight_version]
            other = random.choice([number for number in NUMBERS if number != held])
            tags = random.choice([None, ["weights"], ["kv_cache", "cuda_graph"]])
            moves = {
                f"w-{other}": lambda name=f"w-{other}": update(name),
                f"d-{held}-{other}": lambda name=f"d-{held}-{other}": update(name),
                "pause": lambda: router.pause("in_place"),
                "resume": router.resume,
                "sleep": lambda: router.sleep(random.choice([1, 2]), "keep"),
                f"wake {tags}": lambda tags=tags: router.wake(tags),
            }
            name = random.choice(list(moves))
            for runner in runners:
                runner.gone = {f"w-{held}"} if random.random() < 0.1 else set()
            try:
                await moves[name]()
                said.append(name)
            except FdasyncError as error:
                said.append(f"{name}: {type(error).__name__}")
            await asyncio.sleep(random.uniform(0, 0.5))
            assert not router.stats().dropped
            assert len({one.engine.capacity.weights_id for one in instances}) == 1
        for runner in runners:
            runner.gone = set()
        assert await router.wake() in ("running", "paused")
        await router.resume()
        assert router.load().doing == "running"
        await asyncio.gather(*clients)
        for one in instances:
            check_idle(one.engine)


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    "seed", [*range(6), *[pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 100)]]
)
def test_all_goes_on_once_all_is_undone(seed: int, folders: Path) -> None:
    said: list[str] = []
    with no_leaks():
        try:
            run_sim(play(seed, folders, said))
        except BaseException as error:
            error.add_note(f"seed {seed}: {'; '.join(said)}")
            raise
