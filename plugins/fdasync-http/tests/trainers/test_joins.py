"""Joins of a trainer's group at a port where nobody listens: what goes on meanwhile, and who ends them.

A hostile review found an engine paused for five minutes by a wrong port, whose other calls answered 409.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fdasync_fleet.testing.patience import LINKS
from fdasync_http.application import app
from fdasync_http.config import HttpConfig
from fdasync_http.server import Listen, serving
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

import fdasync
from fdasync import Engine, Instance, WeightsGroup
from fdasync.errors import FdasyncError, UpdateUnderWay
from fdasync.testing import until

sys.path.insert(0, str(Path(__file__).parents[3] / "fdasync-transformers" / "tests" / "support"))

from group_play import PROMPT, engine_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fdasync import Generator

PATHS = ("/init_weights_update_group", "/init_weight_transfer_engine")


@asynccontextmanager
async def client_of(kind: str, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, Engine]]:
    """Of a server over an engine, or over a router of one instance."""
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    async with AsyncExitStack() as stack:
        if kind == "engine":
            engine = Engine(engine_config(tmp_path / "old"))
            generator: Generator = engine
        else:
            address = f"ipc://{tmp_path}/m0"
            config = engine_config(tmp_path / "old", role="mixed", host_blocks=16)
            instance = Instance(config, listen=address, name="m0", links=LINKS, transport="shm", transfer_process=False)
            engine = (await stack.enter_async_context(instance)).engine
            generator = fdasync.connect([address], links=LINKS)
        await stack.enter_async_context(generator)
        settings = {"weights_root": str(tmp_path), **settings}
        served = await stack.enter_async_context(
            serving(app(generator, HttpConfig(**settings)), Listen(port=0, drain_s=1.0))
        )
        yield await stack.enter_async_context(httpx2.AsyncClient(base_url=served.url, timeout=300)), engine


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody listens at it, and nobody will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def body_of(path: str, port: int, **more: Any) -> dict[str, Any]:
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": "g",
            "backend": "gloo", **more}  # fmt: skip
    return info if path == PATHS[0] else {"init_info": info}


def said(answer: httpx2.Response) -> str:
    told = answer.json()
    return str(told["error"]["message"] if "error" in told else told["message"])


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine", "router"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_join_at_a_wrong_port_holds_nothing_up_and_is_ended(
    tmp_path: Path, kind: str, path: str, port: int
) -> None:
    async with client_of(kind, tmp_path) as (client, engine):
        join = asyncio.ensure_future(client.post(path, json=body_of(path, port)))

        async def refused() -> httpx2.Response:
            return await client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "old")})

        await until(lambda: engine.weights.groups.joins)
        answer = await refused()
        # others are told of it
        assert answer.status_code == 409
        assert f"joins the group 'g' by 127.0.0.1:{port}, for up to 1" in said(answer)
        for other in PATHS:
            assert (await client.post(other, json=body_of(other, port))).status_code == 409
        # requests go on
        ask = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await client.post("/generate", json=ask)).status_code == 200
        assert (await client.get("/ready")).json()["doing"] == "running"
        # that of another name is refused, and ends nothing
        assert (await client.post("/destroy_weights_update_group", json={"group_name": "h"})).status_code == 409
        assert not join.done()
        ended = await client.post("/destroy_weights_update_group", json={"group_name": "g"})
        assert (ended.status_code, ended.json()["success"]) == (200, True)
        answer = await join
        assert answer.status_code == 400
        assert "group 'g' was not joined: it was left meanwhile" in said(answer)
        assert (await refused()).status_code == 200


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine", "router"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_away_ends_its_join(tmp_path: Path, kind: str, path: str, port: int) -> None:
    async with client_of(kind, tmp_path) as (client, engine):
        join = asyncio.ensure_future(client.post(path, json=body_of(path, port)))
        await until(lambda: engine.weights.groups.joins)
        join.cancel()
        await until(lambda: not engine.weights.groups.joins, 300)
        answer = await client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "old")})
        assert answer.status_code == 200


async def test_a_front_that_goes_away_ends_its_join(tmp_path: Path, port: int) -> None:
    """Its router is the caller of its instances."""
    async with client_of("router", tmp_path) as (client, engine):
        join = asyncio.ensure_future(client.post(PATHS[0], json=body_of(PATHS[0], port)))
        await until(lambda: engine.weights.groups.joins)
        async with fdasync.connect([f"ipc://{tmp_path}/m0"], links=LINKS) as other:
            # another front's refused join of that group does not end it
            group = WeightsGroup(name="g", address="127.0.0.1", port=port, world_size=2)
            with pytest.raises(UpdateUnderWay, match="joins the group 'g'"):
                await other.join_weights_group(group)
        assert not join.done()
        assert engine.weights.groups.joins
        async with fdasync.connect([f"ipc://{tmp_path}/m0"], links=LINKS) as other:
            await other.leave_weights_group("g")
            await join
            lonely = asyncio.ensure_future(other.join_weights_group(group))
            await until(lambda: engine.weights.groups.joins)
        await until(lambda: not engine.weights.groups.joins, 300)
        with pytest.raises(FdasyncError):
            await lonely


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("path", PATHS)
async def test_the_limit_is_the_servers_or_the_requests(tmp_path: Path, path: str, port: int) -> None:
    async with client_of("engine", tmp_path, group_s=0.3) as (client, engine):
        for more, words in (({}, "for 0.3 s"), ({"timeout_s": 0.2}, "for 0.2 s")):
            answer = await client.post(path, json=body_of(path, port, **more))
            assert answer.status_code == 400
            assert words in said(answer)
        for bad in (0, -1, 4000):
            answer = await client.post(path, json=body_of(path, port, timeout_s=bad))
            assert answer.status_code == 400
            assert "above 0, up to 3600" in said(answer)
        await until(lambda: engine.load().doing == "running")
