"""A trainer that starts again against engines that go on: it begins at version 1, by every way that brings weights.

Engines and a router's instances run in virtual time; what the trainer broadcasts lies in this process. A label names
what came under it last; a span's weights id tells the lives apart.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport

from fdasync import Engine, Instance, Router, RouterConfig, SamplingParams
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import check_sample, no_leaks, oracle_of, run_sim, synthetic_config
from tests.support.broadcast_runner import GROUP, HIGH, LOW, BroadcastRunner, halves, part, runner_of
from tests.support.weights_play.play import FIRST, NUMBERS, write_folders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fdasync import Generator

COSTS = {"step_s": 0.01, "load_s": 0.05, "sleep_s": 0.05, "weights_id": FIRST, "pass_stamp": False}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return root


class Scene:
    """A generator, and the runners behind it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runners: list[BroadcastRunner] = []
        self.generator: Generator
        self.held = FIRST
        # of each request: label, weights id, number
        self.told: list[tuple[str, str, int]] = []

    def runner(self, config: Any) -> BroadcastRunner:
        self.runners.append(runner_of(config))
        return self.runners[-1]

    def sends(self, number: int) -> None:
        for runner in self.runners:
            runner.sends = number

    async def check(self, label: str, number: int) -> None:
        """Requests that come now are served by these weights, and say so."""
        assert self.generator.facts().weight_version == label
        for index in range(2):
            prompt = [*PROMPT, index]
            (sample,) = (await self.generator.complete(prompt, PARAMS)).samples
            config = msgspec.structs.replace(self.runners[0].config, weights_id=number)
            check_sample(sample, prompt, PARAMS, Oracle(config))
            (span,) = sample.weight_version
            assert span.version == label
            self.told.append((label, span.weights_id, number))
        self.held = number


@asynccontextmanager
async def scene_of(kind: str, root: Path) -> AsyncIterator[Scene]:
    scene, network, fabric = Scene(root), SimNetwork(Random(1)), SimFabric(Random(1))
    async with AsyncExitStack() as stack:
        if kind == "engine":
            config = synthetic_config(COSTS, host_blocks=32, model=str(root / f"w-{FIRST}"))
            scene.generator = await stack.enter_async_context(Engine(config, runner=scene.runner(config)))
        else:
            roles = ("mixed", "mixed") if kind == "router" else ("prefill", "decode")
            instances = []
            for number, role in enumerate(roles):
                config = synthetic_config(COSTS, role=role, host_blocks=32, model=str(root / f"w-{FIRST}"))
                instance = Instance(
                    config, listen=f"ipc:///run/{number}", name=f"i{number}", wire=network.wire(f"i{number}"),
                    transports=[SimTransport(fabric)], runner=scene.runner(config),
                )  # fmt: skip
                instances.append(await stack.enter_async_context(instance))
            router = Router([one.address for one in instances], RouterConfig(), wire=network.wire("router"), seed=1)
            scene.generator = await stack.enter_async_context(router)
        yield scene
        assert kind == "engine" or not scene.generator.stats().dropped  # type: ignore[attr-defined]


async def _folder(scene: Scene, label: int, number: int) -> None:
    await scene.generator.update_weights(label, scene.root / f"w-{number}")


async def _delta(scene: Scene, label: int, number: int) -> None:
    if number != scene.held:
        await scene.generator.update_weights(label, scene.root / f"d-{scene.held}-{number}")
    else:
        await _folder(scene, label, number)


async def _tensors(scene: Scene, label: int, number: int) -> None:
    await scene.generator.update_weights(label, halves(number))


async def _join(scene: Scene) -> None:
    await scene.generator.join_weights_group(msgspec.structs.replace(GROUP, world_size=1 + len(scene.runners)))


async def _group(scene: Scene, label: int, number: int) -> None:
    scene.sends(number)
    await scene.generator.update_weights(label, part(), "keep")


async def _buckets(scene: Scene, label: int, number: int) -> None:
    """As slime does: all buckets of a pause have one label."""
    scene.sends(number)
    await scene.generator.pause("retract")
    await scene.generator.reset_cache()
    for meta in (LOW, HIGH):
        await scene.generator.update_weights(label, part(meta), "keep")
    await scene.generator.resume()


async def _parts(scene: Scene, label: int, number: int) -> None:
    """As Miles does: between a begin and an end, each part with the label."""
    scene.sends(number)
    await scene.generator.begin_weight_update()
    for meta in (LOW, HIGH):
        await scene.generator.update_weights(label, part(meta))
    await scene.generator.end_weight_update()


WAYS: dict[str, Callable[[Scene, int, int], Any]] = {
    "folder": _folder, "delta": _delta, "tensors": _tensors, "group": _group, "buckets": _buckets, "parts": _parts,
}  # fmt: skip
BY_GROUP = ("group", "buckets", "parts")


async def restarts(scene: Scene, way: str) -> None:
    random = Random(1)
    for life in range(3):
        if way in BY_GROUP:
            # of the same name, since a trainer does not know of its former life
            await _join(scene)
        # a label in use may come again with other weights, and with the same; "1" comes behind "3" in each new life
        for label in (1, 2, 2, 3):
            number = random.choice([one for one in NUMBERS if one != scene.held]) if label != 2 else NUMBERS[life]
            await WAYS[way](scene, label, number)
            await scene.check(str(label), number)
    assert len({number for label, _, number in scene.told if label == "1"}) > 1
    # an id names one set of weights, whatever label it has
    numbers = {weights_id: number for _, weights_id, number in scene.told}
    assert [numbers[weights_id] for _, weights_id, _ in scene.told] == [number for *_, number in scene.told]


# a router takes no tensors of its own process
@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("engine", "router", "apart") for way in WAYS if kind == "engine" or way != "tensors"],
)
def test_it_begins_at_version_1_again(kind: str, way: str, folders: Path) -> None:
    async def play() -> None:
        async with scene_of(kind, folders) as scene:
            await restarts(scene, way)

    with no_leaks():
        run_sim(play())


@pytest.mark.parametrize("kind", ["engine", "router"])
def test_the_same_folder_under_its_label_changes_nothing(kind: str, folders: Path) -> None:
    async def play() -> None:
        async with scene_of(kind, folders) as scene:
            for number in NUMBERS[1:3]:
                await _folder(scene, 1, number)
                await scene.check("1", number)
                await _folder(scene, 1, number)
                result = await scene.generator.complete([*PROMPT, 0], PARAMS)
                assert result.usage.cached_tokens, "the cache is kept"

    with no_leaks():
        run_sim(play())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["engine", "router"])
def test_a_wake_brings_the_weights_and_not_what_had_their_label_before(kind: str, level: Any, folders: Path) -> None:
    async def play() -> None:
        async with scene_of(kind, folders) as scene:
            for number in NUMBERS[1:4]:
                await _folder(scene, 1, number)
                await scene.generator.sleep(level)
                await scene.generator.wake()
                await scene.check("1", number)
                # others under the label of those that the sleep dropped
                await scene.generator.sleep(level)
                await scene.generator.wake(["weights"])
                await _folder(scene, 1, NUMBERS[0])
                await scene.generator.wake()
                await scene.check("1", NUMBERS[0])

    with no_leaks():
        run_sim(play())


def test_one_that_comes_back_gets_the_weights_and_not_those_that_had_their_label(folders: Path) -> None:
    """It starts with the label in use, and with the weights that the label named before."""

    async def play() -> None:
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(1))

        def instance(name: str, number: int) -> Instance:
            config = synthetic_config(
                {**COSTS, "weights_id": number}, role="mixed", host_blocks=32, model=str(folders / f"w-{number}"),
                weight_version="1",
            )  # fmt: skip
            return Instance(
                config, listen=f"ipc:///run/{name}", name=name, wire=network.wire(name),
                transports=[SimTransport(fabric)], runner=runner_of(config),
            )  # fmt: skip

        async with instance("m0", NUMBERS[0]) as first:
            router = Router([first.address], RouterConfig(), wire=network.wire("router"), seed=1)
            async with router:
                await router.update_weights(2, folders / f"w-{NUMBERS[1]}")
                await router.update_weights(1, folders / f"w-{NUMBERS[2]}")
                async with instance("m1", NUMBERS[0]) as second:
                    await router.add(second.address)
                    assert second.engine.facts().weight_version == "1"
                    assert second.engine.capacity.weights_id == f"{NUMBERS[2]:032x}"
                    for number in range(4):
                        prompt = [number, *PROMPT]
                        (sample,) = (await router.complete(prompt, PARAMS)).samples
                        config = msgspec.structs.replace(oracle_of(second.engine.config).config, weights_id=NUMBERS[2])
                        check_sample(sample, prompt, PARAMS, Oracle(config))
                        assert [span.weights_id for span in sample.weight_version] == [f"{NUMBERS[2]:032x}"]
                    assert not router.stats().dropped

    with no_leaks():
        run_sim(play())
