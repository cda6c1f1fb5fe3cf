"""Where Ray puts instances, what they see of its GPUs, and what is said where it has no room."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from ray_fleets import PROMPT, SOON_S, environment_of, parent_of, until_used

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import BadInput, ConfigError

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.50'")

from fdasync_ray import FleetConfig, NoRoom, RayFleet, attach  # noqa: E402 - behind the skip

pytestmark = [
    # of Ray's own code
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_without_a_cluster_nothing_starts_one_in_silence():
    with pytest.raises(ConfigError, match=r"ray\.init"):
        attach("fleet")
    assert not ray.is_initialized()


async def test_each_instance_has_gpus_of_its_own(cluster, engine_of):
    config = FleetConfig(engine=engine_of(), mixed=4, gpus=1)
    async with RayFleet(config) as fleet:
        members = await fleet.members()
        assert sorted(Counter(one.node for one in members).values()) == [1, 1, 2]
        seen = [(one.node, environment_of(one.pid)["CUDA_VISIBLE_DEVICES"]) for one in members]
        assert all(gpus in ("0", "1") for _, gpus in seen)
        assert len(set(seen)) == 4, f"two instances of a node see the same GPU: {seen}"


async def test_a_group_is_on_one_node_and_no_room_is_an_error_that_names_what_there_is(cluster, engine_of):
    lines: list[str] = []
    config = FleetConfig(engine=engine_of(), mixed=3, gpus=2, place_s=3)
    async with RayFleet(config, lines.append) as fleet, fleet.router() as router:
        members = await fleet.members()
        assert len({one.node for one in members}) == 3
        assert {environment_of(one.pid)["CUDA_VISIBLE_DEVICES"] for one in members} == {"0,1"}
        with pytest.raises(NoRoom) as caught:
            await fleet.scale(mixed=4, limit_s=5)
        error = caught.value
        assert error.names == ("m3",)
        assert error.asked == {"CPU": 1, "GPU": 2}
        assert sorted(node["GPU"] for node in error.nodes) == [0, 2, 2, 2]
        assert error.free == {"CPU": 3, "GPU": 0}
        assert error.fits
        assert "ask for fewer" in str(error)
        # once, and not each time it looks
        assert [line for line in lines if "m3" in line] == ["no node has room for m3; it waits for room"]
        # the others serve, and who waits for room leaves at once
        await router.complete(PROMPT, SamplingParams(max_tokens=4))
        async with asyncio.timeout(SOON_S):
            assert await fleet.scale(mixed=2)
            assert await fleet.scale(mixed=3)
        await until_used(router, (await fleet.members())[-1].address)


async def test_an_instance_that_no_node_can_have_says_so(cluster, engine_of):
    config = FleetConfig(engine=engine_of(), mixed=1, cpus=3, room_s=5, place_s=3)
    with pytest.raises(NoRoom, match=r"m0 for 5 s: .* 3 CPU on one node; there are 4 nodes \(3 with 2 CPU, 1 with 0"):
        async with RayFleet(config):
            pass
    # nothing is left of it
    with pytest.raises(BadInput, match="no fleet 'fleet' runs"):
        attach("fleet")


@pytest.mark.nightly
async def test_ranks_of_a_group_serve_together_on_cpus(cluster, tmp_path: Path):
    tiny = pytest.importorskip("fdasync_transformers.tiny.checkpoints")
    tiny.make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", 0)
    own = {"dtype": "float64", "device": "cpu", "experts": "eager"}
    sizes = {"block_tokens": 16, "num_blocks": 40, "max_context_tokens": 128, "host_blocks": 40}
    engine = EngineConfig(model=str(tmp_path / "model"), runner_config=own, **sizes)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompt = [one % 100 + 3 for one in PROMPT]
    async with Engine(msgspec.structs.replace(engine, runner_config={**own, "num_threads": 1})) as alone:
        expected = (await alone.complete(prompt, params)).samples[0]
    config = FleetConfig(engine=msgspec.structs.replace(engine, tensor_parallel=2), prefill=1, decode=1, cpus=2)
    async with RayFleet(config) as fleet, fleet.router() as router:
        members = await fleet.members()
        assert len({one.node for one in members}) == 2
        for one in members:
            ranks = [pid for pid in map(int, _pids()) if _is_child(pid, one.pid)]
            assert len(ranks) >= 2
        told = (await router.complete(prompt, params)).samples[0]
        assert told.token_ids == expected.token_ids
        assert (told.routing.array == expected.routing.array).all()


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_child(pid: int, parent: int) -> bool:
    try:
        return parent_of(pid) == parent
    except OSError:
        return False
