"""Weights that are pulled over HTTP by the calls of slime's and SkyRL's clients, and loaded by a real engine.

From contracts.md, 2.4 and 3.2, and the clients' own sources of August 2026: each may ask again, and takes any answer
above 399 for a failure.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import publisher
import pytest
from fdasync_http import HttpConfig, app
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from safetensors.numpy import load_file

from fdasync import Engine
from fdasync.testing import synthetic_config, synthetic_engine

sys.path.insert(0, str(Path(__file__).parents[3] / "fdasync-transformers" / "tests" / "support"))

from group_play import engine_config, fresh_tokens, tokens


class Stage:
    """A server, and what its trainer publishes.

    Attributes:
        weights: tensors of versions 0, 1.
    """

    def __init__(self, home, client, engine):
        self.home, self.client, self.engine = home, client, engine
        self.published, self.local = home / "published", home / "pulls" / "local"
        self.weights = [load_file(home / name / "model.safetensors") for name in ("old", "new")]

    async def post(self, path, body=None, status=200, **more):
        answer = await self.client.post(path, json={} if body is None else body, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def pull(self, version, status=200, **more):
        body = {"local_checkpoint_dir": str(self.local), "source_dir": str(self.published), "target_version": version}
        return await self.post("/pull_weights", {**body, **more}, status)


@asynccontextmanager
async def stage_of(home, **config):
    for number, name in enumerate(("old", "new")):
        make_tiny_checkpoint(home / name, "qwen3_moe", number)
    for name in ("published", "pulls"):
        (home / name).mkdir()
    settings = {"weights_root": str(home / "published"), "pulls_root": str(home / "pulls"), **config}
    async with Engine(engine_config(home / "old")) as engine:
        transport = httpx2.ASGITransport(app(engine, HttpConfig(**settings)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front", timeout=300) as client:
            yield Stage(home, client, engine)


@pytest.mark.ci
async def test_slime_publishes_deltas_and_has_them_pulled_before_it_pauses(tmp_path):
    async with stage_of(tmp_path) as stage:
        # what hosts hold before the first update, while the trainer takes its own copy
        await stage.pull(0)
        publisher.slime(stage.published, 1, *stage.weights)
        before = await tokens(stage.engine)
        told = [*await asyncio.gather(stage.pull(1), stage.pull(1)), await stage.pull(1)]
        assert [one["success"] for one in told] == [True, True, True]
        # nothing was loaded by it
        assert await tokens(stage.engine) == before
        await stage.post("/pause_generation")
        assert (await stage.client.get("/flush_cache")).status_code == 200
        update = {"model_path": str(stage.local), "weight_version": "1"}
        for _ in range(2):
            assert (await stage.post("/update_weights_from_disk", update))["success"]
        await stage.post("/continue_generation")
        assert (await stage.client.get("/get_weight_version")).json() == {"weight_version": "1"}
        assert await tokens(stage.engine) == await fresh_tokens(tmp_path / "new")


@pytest.mark.ci
async def test_skyrl_fetches_pauses_brackets_and_loads(tmp_path):
    async with stage_of(tmp_path) as stage:
        told = publisher.skyrl(stage.published, 1, *stage.weights)
        assert "init_weight_transfer_engine" in (await stage.post("/fetch_weights", told, 400))["error"]["message"]
        call = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
        await stage.post("/collective_rpc", call, 501)
        init = {"base_model_path": "some/name", "local_checkpoint_dir": str(stage.local), "cloud_download_workers": 4}
        for _ in range(2):
            await stage.post("/init_weight_transfer_engine", {"init_info": init})
        early = await stage.post("/update_weights", {"update_info": told}, 400)
        assert "/fetch_weights for 1 first" in early["error"]["message"]
        for _ in range(2):
            assert (await stage.post("/fetch_weights", told))["status"] == "ok"
        await stage.post("/pause?mode=keep&clear_cache=false")
        await stage.post("/reset_prefix_cache", {"reset_running_requests": True})
        assert await stage.post("/collective_rpc", call) == {"results": [None]}
        await stage.post("/update_weights", {"update_info": told})
        await stage.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})
        await stage.post("/resume")
        # any other call would be one into workers
        await stage.post("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {}}, 501)
        assert await tokens(stage.engine) == await fresh_tokens(tmp_path / "new")


@pytest.mark.ci
async def test_what_is_damaged_is_told_and_the_weights_in_use_stay(tmp_path):
    async with stage_of(tmp_path) as stage:
        before = await tokens(stage.engine)
        folder = publisher.slime(stage.published, 1, *stage.weights)
        file = folder / "model-00000-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        answer = await stage.pull(1, 400)
        assert not answer["success"]
        assert "ends before" in answer["message"]
        assert await tokens(stage.engine) == before


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    ("changes", "config", "told"),
    [
        ({"local_checkpoint_dir": "{home}/published/mine"}, {}, "folder of pulled checkpoints"),
        ({"local_checkpoint_dir": "{home}/pulls"}, {}, "folder of pulled checkpoints"),
        ({"local_checkpoint_dir": "{home}/pulls/link/mine"}, {}, "folder of pulled checkpoints"),
        ({"local_checkpoint_dir": "{home}/pulls/../mine"}, {}, "folder of pulled checkpoints"),
        ({"source_dir": "{home}"}, {}, "outside of the folder"),
        ({"source_dir": "{home}/published/no"}, {}, "no folder"),
        ({}, {"pulls_root": ""}, "--pulls-root"), ({}, {}, "no checkpoint folder"),
    ],
)  # fmt: skip
async def test_only_folders_that_were_opened_are_written_and_read(tmp_path, changes, config, told):
    for name in ("published", "pulls"):
        (tmp_path / name).mkdir()
    (tmp_path / "pulls" / "link").symlink_to(tmp_path)
    settings = {"weights_root": str(tmp_path / "published"), "pulls_root": str(tmp_path / "pulls"), **config}
    body = {"local_checkpoint_dir": str(tmp_path / "pulls" / "local"), "source_dir": str(tmp_path / "published")}
    body |= {name: value.replace("{home}", str(tmp_path)) for name, value in changes.items()}
    async with synthetic_engine(synthetic_config()) as engine:
        transport = httpx2.ASGITransport(app(engine, HttpConfig(**settings)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front") as client:
            answer = await client.post("/pull_weights", json={**body, "target_version": 1})
            assert answer.status_code == 400
            assert told in answer.json()["message"]
            for uri in ("gs://bucket/delta-00000001", "s3://bucket"):
                init = {"init_info": {"local_checkpoint_dir": str(tmp_path / "pulls" / "local")}}
                if settings["pulls_root"]:
                    assert (await client.post("/init_weight_transfer_engine", json=init)).status_code == 200
                    refused = await client.post("/fetch_weights", json={"target_version": 1, "uri": uri})
                    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "uri")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published", "pulls"]
    assert [path.name for path in (tmp_path / "pulls").iterdir()] == ["link"]


async def test_a_session_is_finished_as_often_as_it_is_said(scene):
    for name in ("trajectory-1", "trajectory-1", "unknown"):
        answer = await scene.client.post("/finish_session", params={"session_id": name})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    answer = await scene.client.post("/finish_session")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
