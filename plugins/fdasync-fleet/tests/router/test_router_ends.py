"""Ends that come in the middle of a group's hand-over, and ends that a router makes itself: what results then hold."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport

from fdasync import Instance, Router, RouterConfig, SamplingParams
from fdasync.errors import InstanceLost
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config
from tests.support.broadcast_runner import runner_of
from tests.support.router_scene import in_scene, settle
from tests.support.weights_play.play import FIRST, NUMBERS, write_folders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fdasync_fleet.router.stream import RoutedStream

PROMPT = list(range(1, 23))
GROUP = SamplingParams(n=4, max_tokens=200, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return root


class Scene:
    """An instance that prefills one sample after the other, slowly, one that decodes them, and two routers."""

    def __init__(self, handoff_s: float) -> None:
        self.network, self.fabric = SimNetwork(Random(1)), SimFabric(Random(1))
        self.prefill = self.instance("prefill", 0.5, max_running=1)
        self.decode = self.instance("decode", 0.02, num_blocks=600)
        self.router, self.other = (
            Router(
                [self.prefill.address, self.decode.address], RouterConfig(handoff_s=handoff_s),
                wire=self.network.wire(f"router{number}"), seed=number,
            )
            for number in range(2)
        )  # fmt: skip

    def instance(self, role: str, step_s: float, **values: Any) -> Instance:
        costs = {"step_s": step_s, "load_s": 0.05, "weights_id": FIRST, "pass_stamp": False}
        config = synthetic_config(costs, role=role, host_blocks=64, **values)
        return Instance(
            config, listen=f"ipc:///run/{role}", name=role, wire=self.network.wire(role),
            transports=[SimTransport(self.fabric)], runner=runner_of(config),
        )  # fmt: skip

    def check(self, stream: RoutedStream, reason: str) -> None:
        """Whole samples, and the others with rows and weights of all tokens that they have."""
        samples = stream.result.samples
        reasons = {sample.finish_reason for sample in samples}
        assert reasons <= {"length", reason}
        assert reason in reasons
        assert any(sample.token_ids for sample in samples)
        oracle = Oracle(msgspec.structs.replace(oracle_of(self.prefill.engine.config).config, weights_id=FIRST))
        for sample in samples:
            check_sample(sample, PROMPT, GROUP, oracle)
            assert [(span.start, span.stop, span.version) for span in sample.weight_version] == (
                [(0, len(sample.token_ids), "0")] if sample.token_ids else []
            )


@asynccontextmanager
async def partly_handed_over(handoff_s: float = 0.1, **options: Any) -> AsyncIterator[tuple[Scene, RoutedStream]]:
    """A request of which the decode instance has some samples, and its caller their first tokens."""
    scene = Scene(handoff_s)
    async with (
        scene.prefill,
        scene.decode,
        scene.router,
        scene.other,
        scene.router.generate(PROMPT, GROUP, **options) as stream,
    ):
        seen: set[int] = set()
        async for delta in stream:
            seen.add(delta.index)
            if len(seen) == 2:
                break
        assert scene.decode.engine.stats().scheduler.leased, "the others are still to come"
        yield scene, stream
        assert scene.router.dispatch.num_held == 0
        for instance in (scene.prefill, scene.decode):
            await instance.engine.resume()
        # steps in flight end, and blocks that nobody uses any more are copied to the host
        await asyncio.sleep(2)
        for instance in (scene.prefill, scene.decode):
            check_idle(instance.engine)


ENDS = {
    "update": lambda scene, folder, _stream: scene.router.update_weights(1, folder, "abort"),
    "pause": lambda scene, _folder, _stream: scene.router.pause("abort"),
    "abort": lambda _scene, _folder, stream: aborted(stream),
    "close": lambda scene, _folder, _stream: scene.router.aclose(),
    "sleep": lambda scene, _folder, _stream: scene.other.sleep(1, "abort"),
    "pause of the decode side": lambda scene, _folder, _stream: scene.decode.engine.pause("abort"),
    "another router's update": lambda scene, folder, _stream: scene.other.update_weights(1, folder, "abort"),
    "another router's pause": lambda scene, _folder, _stream: scene.other.pause("abort"),
    "pause of the prefill side": lambda scene, _folder, _stream: scene.prefill.engine.pause("abort"),
}


async def aborted(stream: RoutedStream) -> None:
    stream.abort()


@pytest.mark.ci(after=6)
@pytest.mark.parametrize("later_s", [0.0, 0.3])
@pytest.mark.parametrize("end", ENDS)
def test_a_group_that_is_handed_over_in_part_ends_as_others_do(end: str, later_s: float, folders: Path) -> None:
    async def play() -> None:
        async with partly_handed_over() as (scene, stream):
            await asyncio.sleep(later_s)
            await ENDS[end](scene, str(folders / f"w-{NUMBERS[1]}"), stream)
            await stream.finished()
            scene.check(stream, "abort")
            if end == "sleep":
                await scene.other.wake()

    with no_leaks():
        run_sim(play())


@pytest.mark.ci
def test_one_that_ends_while_a_sample_is_being_read_loses_nothing() -> None:
    async def play(later_s: float) -> None:
        async with partly_handed_over() as (scene, stream):
            # the prefill side's word of the end comes long after it
            scene.network.conditions = NetworkConditions(delay_s=(0.1, 0.1))
            await asyncio.sleep(later_s)
            await scene.prefill.engine.pause("abort")
            await stream.finished()
            scene.check(stream, "abort")

    with no_leaks():
        # in some of these a sample is on its way
        for step in range(10):
            run_sim(play(step * 0.06))


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_an_update_waits_for_the_rest_of_a_group(mode: Any, folders: Path) -> None:
    async def play() -> None:
        async with partly_handed_over(60.0) as (scene, stream):
            await scene.router.update_weights(1, str(folders / f"w-{NUMBERS[1]}"), mode)
            result = await stream.finished()
            # all of them came to the decode instance before
            assert all(sample.token_ids for sample in result.samples)
            assert {sample.finish_reason for sample in result.samples} == {"abort" if mode == "abort" else "length"}
            if mode == "abort":
                scene.check(stream, "abort")

    with no_leaks():
        run_sim(play())


def test_a_deadline_in_the_middle_of_a_hand_over_gives_tokens_rows_and_versions() -> None:
    async def play() -> None:
        async with partly_handed_over(deadline_s=3.0) as (scene, stream):
            await stream.finished()
            scene.check(stream, "deadline")

    with no_leaks():
        run_sim(play())


# -- ends that no instance makes


@in_scene("m0")
async def test_tokens_whose_rows_no_instance_tells_are_no_result(scene):
    for reason, deadline_s in (("deadline", 1.0), ("abort", None)):
        async with scene.router.generate((1, 2, 3), SamplingParams(n=2), deadline_s=deadline_s) as stream:
            await settle()
            name = scene.m0.submits[-1].request
            scene.m0.sample(name, 7)
            scene.m0.tokens(name, 7, finish="length")
            scene.m0.tokens(name, 8, index=1)
            await settle()
            if reason == "abort":
                stream.abort()
            with pytest.raises(InstanceLost, match="m0 did not end it in time") as caught:
                await stream.finished()
            whole, torn = caught.value.partial.samples
            assert (whole.token_ids, whole.finish_reason) == ((7,), "length")
            assert (torn.token_ids, torn.finish_reason, torn.weight_version) == ((8,), "failed", ())


@in_scene("m0")
async def test_without_tokens_nothing_is_missing(scene):
    for deadline_s in (1.0, None):
        async with scene.router.generate((1, 2, 3), SamplingParams(n=2), deadline_s=deadline_s) as stream:
            await settle()
            name = scene.m0.submits[-1].request
            scene.m0.sample(name, 7)
            scene.m0.tokens(name, 7, finish="length")
            await settle()
            if deadline_s is None:
                stream.abort()
            samples = (await stream.finished()).samples
            reason = "abort" if deadline_s is None else "deadline"
            assert [(one.token_ids, one.finish_reason) for one in samples] == [((7,), "length"), ((), reason)]
