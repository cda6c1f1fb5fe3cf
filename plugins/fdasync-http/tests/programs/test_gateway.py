"""SGLang's gateway (`smg`) before two of our servers: it learns what they are, balances, and outlives one of them."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

pytestmark = pytest.mark.nightly
BODY = {
    "input_ids": [1, 2, 3], "return_logprob": True, "return_routed_experts": True,
    "sampling_params": {"max_new_tokens": 6, "temperature": 0},
}  # fmt: skip
WAIT_S = 300.0


@pytest.fixture
def gateway_of(program, run_program, free_port):
    @asynccontextmanager
    async def start(*fronts):
        port = free_port()
        command = [
            program("smg"), "launch", "--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1",
            "--prometheus-port", free_port(), "--policy", "round_robin", "--health-check-interval-secs", 1,
            "--health-check-timeout-secs", 2, "--load-monitor-interval", 1, "--enable-rl", "--log-level", "warn",
            "--worker-urls", *[front.url for front in fronts],
        ]  # fmt: skip
        async with (
            run_program(*map(str, command)) as (process, said),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
        ):

            async def ready():
                assert process.returncode is None, said.read_text()
                return len(await ready_urls(client)) == len(fronts)

            await until(ready)
            yield client

    return start


async def until(met):
    async with asyncio.timeout(WAIT_S):
        while not await met():  # noqa: ASYNC110 - programs tell in no other way
            await asyncio.sleep(0.1)


async def ready_urls(client):
    try:
        workers = (await client.get("/workers")).json()["workers"]
    except httpx2.TransportError:
        return []
    return sorted(worker["url"] for worker in workers if worker["status"] == "ready")


def children_of(pid):
    """Processes that it started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    """Whether there is such a process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def counted(front, path, status=200):
    """How many answers of this path a server has begun."""
    async with httpx2.AsyncClient(base_url=front.url, timeout=300) as client:
        text = (await client.get("/metrics")).text
    found = re.search(rf'^fdasync_http_answers_total{{path="{path}",status="{status}"}} ([\d.]+)$', text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


async def test_requests_are_balanced_and_answers_unchanged(front_of, gateway_of):
    async with front_of() as one, front_of() as two, gateway_of(one, two) as gateway:
        for worker in (await gateway.get("/workers")).json()["workers"]:
            # from /v1/models, /server_info and /model_info
            assert (worker["runtime_type"], worker["model_id"], worker["connection_mode"]) == (
                "sglang", "tiny-moe", "http",
            )  # fmt: skip
            assert worker["models"][0]["context_length"] == 4096
            assert (worker["labels"]["tp_size"], worker["labels"]["weight_version"]) == ("1", "0")
        async with httpx2.AsyncClient(base_url=one.url, timeout=300) as client:
            direct = (await client.post("/generate", json=BODY)).json()
        answers = await asyncio.gather(*[gateway.post("/generate", json=BODY) for _ in range(20)])
        for answer in answers:
            assert answer.status_code == 200, answer.text
            got = answer.json()
            assert got["output_ids"] == direct["output_ids"]
            for name in ("routed_experts", "output_token_logprobs", "finish_reason", "completion_tokens"):
                assert got["meta_info"][name] == direct["meta_info"][name]
        # one call was made without the gateway
        assert [await counted(one, "/generate"), await counted(two, "/generate")] == [11, 10]
        streams = [gateway.post("/generate", json={**BODY, "stream": True}) for _ in range(2)]
        for answer in await asyncio.gather(*streams):
            *events, last = answer.text.strip().split("\n\n")
            assert last == "data: [DONE]"
            assert [len(re.findall('routed_experts"', event)) for event in events][-2:] == [0, 1]
        chat = {"model": "tiny-moe", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        texts = {(await gateway.post("/v1/completions", json={"model": "tiny-moe", "prompt": "ab", "max_tokens": 4,
                                                              "temperature": 0})).json()["choices"][0]["text"]
                 for _ in range(2)}  # fmt: skip
        assert len(texts) == 1
        for _ in range(2):
            assert (await gateway.post("/v1/chat/completions", json=chat)).json()["usage"]["completion_tokens"] == 3
        for front in (one, two):
            assert [await counted(front, f"/v1/{path}") for path in ("completions", "chat/completions")] == [1, 1]
            assert await counted(front, "/health")

        async def loads():
            told = (await gateway.get("/get_loads")).json()["loads"]
            return {(load["worker"], load["max_total_num_tokens"]) for load in told}

        async def both_told():
            return await loads() == {(front.url, 4096 * 16) for front in (one, two)}

        await until(both_told)


async def test_control_reaches_every_server(front_of, gateway_of):
    """The gateway's control plane for RL passes calls on to all of them."""
    async with front_of() as one, front_of() as two, gateway_of(one, two) as gateway:

        async def all_of(path, body):
            answer = await gateway.post(f"/v1/rl/engine/{path}", params={"selector": "engine=sglang"}, json=body)
            assert (answer.json()["succeeded"], answer.json()["failed"]) == (2, []), answer.text

        await all_of("pause_generation", {"mode": "in_place"})
        held = [asyncio.ensure_future(gateway.post("/generate", json=BODY)) for _ in range(2)]
        for front in (one, two):
            async with httpx2.AsyncClient(base_url=front.url, timeout=300) as client:

                async def waits(client=client):
                    return (await client.get("/v1/loads")).json()["loads"][0]["num_reqs"] == 1

                await until(waits)
        assert not any(call.done() for call in held)
        await all_of("update_weight_version", {"new_version": "seven", "abort_all_requests": False})
        await all_of("continue_generation", {})
        for answer in await asyncio.gather(*held):
            assert answer.json()["meta_info"]["weight_version"] == "seven"
        await all_of("flush_cache", {})


async def test_a_killed_server_costs_no_request(front_of, gateway_of):
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(front_of())
        lost = await stack.enter_async_context(front_of(step_s=0.05))
        gateway = await stack.enter_async_context(gateway_of(kept, lost))
        long = {**BODY, "sampling_params": {"max_new_tokens": 60, "temperature": 0}}
        running = [asyncio.ensure_future(gateway.post("/generate", json=long)) for _ in range(8)]
        async with httpx2.AsyncClient(base_url=lost.url, timeout=300) as client:

            async def runs():
                return (await client.get("/v1/loads")).json()["loads"][0]["num_reqs"] == 4

            await until(runs)
        engines = children_of(lost.process.pid)
        lost.process.kill()
        await lost.process.wait()
        # those that it had are sent again, and new ones go to the other
        after = await asyncio.gather(*[gateway.post("/generate", json=BODY) for _ in range(20)])
        answers = [*after, *await asyncio.gather(*running)]
        assert [answer.status_code for answer in answers] == [200] * 28, [answer.text[:200] for answer in answers]
        assert len({str(answer.json()["output_ids"]) for answer in answers[20:]}) == 1

        async def found_out():
            return await ready_urls(gateway) == [kept.url]

        await until(found_out)

        async def engine_ended():
            return not any(is_running(pid) for pid in engines)

        assert len(engines) == 1
        await until(engine_ended)
        async with front_of(port=lost.port):

            async def is_back():
                return len(await ready_urls(gateway)) == 2

            await until(is_back)
