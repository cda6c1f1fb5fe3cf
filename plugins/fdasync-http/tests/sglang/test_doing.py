"""One word for what an engine does, wherever it is told: readiness, health, sight, `fdasync top`, wakes.

Each state is prepared on engines and told apart from the others, as a whole and for each instance of a router.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx2
import msgspec
import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_http import app

import fdasync
from fdasync import Instance
from fdasync.errors import WeightsDiffer
from fdasync.telemetry.sight.summary import Summary
from fdasync.testing import LetterTokenizer, synthetic_config, synthetic_engine, until

PROMPT = [5, 6, 7, 8, 9]
STATES = ["paused", "updating", "asleep", "waking", "waits_for_weights", "broken"]


def tensors(number):
    return [("weights", "uint64", (1,), number.to_bytes(8, "little"))]


async def prepare(engine, state, tasks):
    """Bring an engine to a state."""
    if state == "paused":
        await engine.pause()
    elif state == "updating":
        await engine.begin_weight_update()
    elif state == "asleep":
        await engine.sleep(1)
    elif state == "waking":
        await engine.sleep(1)
        tasks.append(asyncio.ensure_future(engine.wake()))
        await until(lambda: engine.load().doing == "waking")
    elif state == "waits_for_weights":
        await engine.update_weights(1, tensors(5))
        await engine.sleep(2)
        assert await engine.wake() == "waits_for_weights"
    elif state == "broken":
        with pytest.raises(WeightsDiffer):
            await engine.update_weights(1, tensors(5), expected="0" * 32)
    assert engine.load().doing == state


class Stage:
    """A front over a generator, and the engines behind it."""

    def __init__(self, client, generator, engines):
        self.client, self.generator, self.engines = client, generator, engines

    async def get(self, path):
        answer = await self.client.get(path)
        return answer.status_code, answer.json()

    async def post(self, path, body=None):
        answer = await self.client.post(path, json={} if body is None else body)
        return answer.status_code, answer.json()

    async def sight(self):
        return msgspec.convert((await self.get("/v1/sight"))[1], Summary)


@pytest.fixture
async def stage_of(tmp_path):
    async with AsyncExitStack() as stack:

        async def make(count=0, **runner):
            engines = []
            if count:
                addresses = [f"ipc://{tmp_path}/m{number}" for number in range(count)]
                for number, address in enumerate(addresses):
                    config = synthetic_config(runner, role="mixed", host_blocks=64, leases=LEASES)
                    instance = Instance(
                        config, listen=address, name=f"m{number}", tokenizer=LetterTokenizer(), transport="shm",
                        transfer_process=False, links=LINKS,
                    )  # fmt: skip
                    engines.append((await stack.enter_async_context(instance)).engine)
                generator = await stack.enter_async_context(fdasync.connect(addresses, links=LINKS))
            else:
                generator = await stack.enter_async_context(synthetic_engine(synthetic_config(runner)))
                engines.append(generator)
            transport = httpx2.ASGITransport(app(generator))
            client = await stack.enter_async_context(
                httpx2.AsyncClient(transport=transport, base_url="http://front", timeout=300)
            )
            return Stage(client, generator, engines)

        yield make


@pytest.mark.parametrize("state", STATES)
async def test_an_engine_is_not_ready_and_says_what_it_does(stage_of, state):
    stage, tasks = await stage_of(sleep_s=0.1 if state == "waking" else 0.0), []
    assert await stage.get("/ready") == (200, {"status": "ok", "doing": "running"})
    await prepare(stage.engines[0], state, tasks)
    status, answer = await stage.get("/ready")
    assert (status, answer["error"]["code"]) == (503, state)
    # requests wait for all of it but for broken weights, at which they fail
    for path, name in (("/health", "doing"), ("/health_generate", "status")):
        status, answer = await stage.get(path)
        if state == "broken":
            assert (status, answer["error"]["code"]) == (503, "broken")
        else:
            assert (status, answer[name]) == (200, state)
    assert (await stage.get("/live"))[0] == 200
    told = await stage.sight()
    assert (told.state, told.states) == (state, {state: 1})
    assert told.engines[0].state == state
    assert [state.replace("_", " ").split()[0] in problem for problem in told.problems] == (
        [True] if state in ("waits_for_weights", "broken") else []
    )
    await asyncio.gather(*tasks)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("state", [state for state in STATES if state != "waking"])
async def test_each_instance_says_what_it_does_and_the_router_does_what_one_can(stage_of, state):
    stage = await stage_of(2)
    first, second = stage.engines

    def said():
        return [one.doing for one in stage.generator.load().instances]

    await prepare(first, state, [])
    await until(lambda: said() == [state, "running"])
    assert (await stage.get("/ready"))[0] == (await stage.get("/health"))[0] == 200
    told = await stage.sight()
    assert (told.state, told.states) == ("running", {"running": 1, state: 1})
    assert {one.name: one.state for one in told.engines} == {"m0": state, "m1": "running"}
    assert all(problem.startswith("m0: ") for problem in told.problems)
    other = "asleep" if state != "asleep" else "paused"
    await prepare(second, other, [])
    await until(lambda: said() == [state, other])
    status, answer = await stage.get("/ready")
    assert (status, answer["error"]["code"]) == (503, stage.generator.load().doing)
    assert f"m0: {state}" in answer["error"]["message"]
    assert f"m1: {other}" in answer["error"]["message"]


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("path", ["/wake_up", "/resume_memory_occupation"])
@pytest.mark.parametrize("count", [0, 2])
async def test_a_wake_that_leaves_weights_missing_says_so(stage_of, tmp_path, path, count):
    stage = await stage_of(count)
    for engine in stage.engines:
        await engine.update_weights(1, tensors(5))
        await engine.sleep(2)
    for _ in range(2):
        status, answer = await stage.post(path)
        assert (status, answer["doing"]) == (202, "waits_for_weights")
        assert "update" in answer["message"]
    if count:
        return
    assert (await stage.get("/ready"))[1]["error"]["code"] == "waits_for_weights"
    await stage.engines[0].update_weights(2, tensors(6))
    assert (await stage.get("/ready"))[0] == 200
    status, answer = await stage.post(path)
    assert (status, answer["doing"]) == (200, "running")


@pytest.mark.parametrize("state", [state for state in STATES if state != "waking"])
async def test_a_wake_says_awake_only_where_it_is(stage_of, state):
    stage = await stage_of()
    await prepare(stage.engines[0], state, [])
    if state == "updating":
        assert (await stage.post("/wake_up"))[0] == 409
        return
    part = {"tags": ["weights"]} if state == "asleep" else {}
    _, vllm = await stage.post("/wake_up", part)
    _, sglang = await stage.post("/resume_memory_occupation", part)
    assert vllm["doing"] == sglang["doing"] == state
    assert vllm["status"] == ("awake" if state == "paused" else state)
    assert vllm["message"] == sglang["message"]
    assert ("still released" in vllm["message"]) == (state == "asleep")
    assert ("broken" in vllm["message"]) == (state == "broken")


@pytest.mark.parametrize("state", STATES)
async def test_a_pause_and_a_sleep_are_told_with_the_reason(stage_of, state):
    stage, tasks = await stage_of(sleep_s=0.1 if state == "waking" else 0.0), []
    running = {"is_paused": False, "doing": "running"}
    assert await stage.get("/is_paused") == (200, running)
    await prepare(stage.engines[0], state, tasks)
    assert await stage.get("/is_paused") == (200, {"is_paused": True, "doing": state})
    asleep = state in ("asleep", "waking")
    assert await stage.get("/is_sleeping") == (200, {"is_sleeping": asleep, "doing": state})
    await asyncio.gather(*tasks)


async def test_a_sleep_that_releases_nothing_is_not_told_as_one_that_does(stage_of):
    stage = await stage_of()
    await stage.post("/sleep?level=0")
    for path in ("/ready", "/v1/sight"):
        assert "memory is released" not in str(await stage.get(path))
    assert (await stage.get("/ready"))[1]["error"]["code"] == "asleep"


@pytest.mark.ci
async def test_of_two_instances_a_sleep_of_one_is_a_sleep_and_a_pause_of_one_is_none(stage_of):
    stage = await stage_of(2)
    await stage.engines[0].sleep(1)
    await until(lambda: stage.generator.load().asleep)
    assert (await stage.get("/is_sleeping"))[1] == {"is_sleeping": True, "doing": "running"}
    assert (await stage.get("/is_paused"))[1] == {"is_paused": False, "doing": "running"}
    await stage.engines[1].pause()
    await until(lambda: stage.generator.load().paused)
    assert (await stage.get("/is_paused"))[1]["is_paused"] is True


@pytest.mark.parametrize("count", [0, 2])
async def test_an_update_while_the_weights_alone_are_awake_is_no_end_of_the_sleep(stage_of, count):
    """Requests wait for the wake of the rest, with the update and after it."""
    stage = await stage_of(count)

    async def doing():
        return (await stage.get("/ready"))[1]["error"]["code"], (await stage.get("/is_sleeping"))[1]["is_sleeping"]

    await stage.post("/release_memory_occupation")
    assert (await stage.post("/resume_memory_occupation", {"tags": ["weights"]}))[1]["doing"] == "asleep"
    assert await doing() == ("asleep", True)
    await stage.post("/begin_weight_update")
    assert stage.generator.load().updating
    for _ in range(2):
        assert await doing() == ("asleep", True)
        # what instances say, too, which comes with their next heartbeat
        await until(lambda: all(one.doing == "asleep" for one in stage.generator.load().instances))
    assert (await stage.post("/end_weight_update"))[0] == 200
    assert await doing() == ("asleep", True)
    assert (await stage.post("/wake_up"))[1]["doing"] == "running"
    assert (await stage.get("/ready"))[0] == 200


async def test_wakes_in_parts_and_of_what_is_paused_are_whole_answers(stage_of):
    stage = await stage_of()
    await stage.post("/sleep", {"level": 1})
    assert (await stage.post("/wake_up", {"tags": ["weights"]}))[1]["doing"] == "asleep"
    status, answer = await stage.post("/wake_up")
    assert (status, answer["status"], answer["doing"]) == (200, "awake", "running")
    await stage.post("/pause_generation")
    await stage.post("/release_memory_occupation")
    for _ in range(2):
        status, answer = await stage.post("/resume_memory_occupation", {"tags": []})
        assert (status, answer["doing"]) == (200, "paused")
    assert await stage.get("/is_sleeping") == (200, {"is_sleeping": False, "doing": "paused"})


@pytest.mark.parametrize("count", [0, 2])
async def test_trainers_are_told_that_memory_can_be_released(stage_of, count):
    """They gate release and resume on it (contracts.md, 2.5)."""
    stage = await stage_of(count)
    for path in ("/server_info", "/get_server_info"):
        assert (await stage.get(path))[1]["enable_memory_saver"] is True
    assert stage.generator.facts().can_sleep


async def test_and_that_it_cannot_where_it_cannot(stage_of, tmp_path):
    config = synthetic_config({}, role="mixed", host_blocks=64, leases=LEASES)
    address = f"ipc://{tmp_path}/d0"
    mapped = Instance(
        config, listen=address, links=LINKS, tokenizer=LetterTokenizer(), transport="device", transfer_process=False
    )
    async with mapped, fdasync.connect([address], links=LINKS) as router:
        assert mapped.engine.capacity.no_sleep
        transport = httpx2.ASGITransport(app(router))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front") as client:
            assert (await client.get("/server_info")).json()["enable_memory_saver"] is False
            refused = await client.post("/release_memory_occupation", json={})
            assert refused.status_code == 501
