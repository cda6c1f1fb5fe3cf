"""Trainers that broadcast weights: slime, Miles, AReaL (SGLang's paths) and TRL, SkyRL (vLLM's), each as it calls.

A real engine of a tiny checkpoint receives from a real trainer, a process with a group of torch. From contracts.md,
2.4, 3.2 and 5: what clients repeat does no harm, and a second update while one is open is 409.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
from fdasync_http.application import app
from fdasync_http.config import HttpConfig
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from safetensors.torch import load_file

from fdasync import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[3] / "fdasync-transformers" / "tests" / "support"))

from group_play import PROMPT, Trainer, engine_config, fresh_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Scene(NamedTuple):
    """A server, a trainer beside it, and what the trainer sends."""

    client: httpx2.AsyncClient
    trainer: Trainer
    stored: dict[str, Any]
    new: Path


@asynccontextmanager
async def scene_of(tmp_path: Path, *options: str) -> AsyncIterator[Scene]:
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    make_tiny_checkpoint(tmp_path / "new", "qwen3_moe", 1)
    async with (
        Engine(engine_config(tmp_path / "old")) as engine,
        Trainer.running(tmp_path / "new", 2, *options) as trainer,
    ):
        transport = httpx2.ASGITransport(app(engine, HttpConfig(weights_root=str(tmp_path))))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front", timeout=300) as client:
            yield Scene(client, trainer, load_file(tmp_path / "new" / "model.safetensors"), tmp_path / "new")


async def post(scene: Scene, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await scene.client.post(path, json={} if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def generated(scene: Scene) -> tuple[int, ...]:
    sampling = {"temperature": 0.0, "max_new_tokens": 6}
    answer = await post(scene, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    return tuple(token for _, token, _ in answer["meta_info"]["output_token_logprobs"])


async def sglang_join(scene: Scene, group: Any) -> None:
    body = {"master_address": group.address, "master_port": str(group.port), "rank_offset": 1, "world_size": 2,
            "group_name": group.name, "backend": "gloo"}  # fmt: skip
    assert (await post(scene, "/init_weights_update_group", body))["success"]
    await scene.trainer.read("met")
    # an answer that was lost is asked for again
    assert (await post(scene, "/init_weights_update_group", body))["success"]


def sglang_body(scene: Scene, names: list[str], **more: Any) -> dict[str, Any]:
    shapes = [list(scene.stored[name].shape) for name in names]
    dtypes = [str(scene.stored[name].dtype).removeprefix("torch.") for name in names]
    return {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": scene.trainer.group.name, **more}


async def sglang_send(scene: Scene, names: list[str], **more: Any) -> None:
    await scene.trainer.broadcast(names)
    assert (await post(scene, "/update_weights_from_distributed", sglang_body(scene, names, **more)))["success"]
    await scene.trainer.read("sent")


@pytest.mark.ci
async def test_slime_pauses_and_sends_bucket_by_bucket_under_one_version(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        await post(scene, "/pause_generation", {})
        await scene.client.get("/flush_cache")
        await sglang_join(scene, scene.trainer.group)
        names = list(scene.stored)
        for some in (names[:9], names[9:]):
            await sglang_send(scene, some, flush_cache=False, weight_version="5")
        await post(scene, "/continue_generation", {})
        assert (await scene.client.get("/get_weight_version")).json() == {"weight_version": "5"}
        assert await generated(scene) == await fresh_tokens(scene.new)
        for _ in range(2):
            await post(scene, "/destroy_weights_update_group", {"group_name": scene.trainer.group.name})


@pytest.mark.ci
@pytest.mark.parametrize("leaves", [True, False])
async def test_slime_begins_at_version_1_again_when_it_restarts(tmp_path: Path, leaves: bool) -> None:
    """The server runs on; a new trainer joins under the old name, whether the old one said goodbye or died."""
    async with scene_of(tmp_path) as scene:
        make_tiny_checkpoint(tmp_path / "other", "qwen3_moe", 2)
        async with Trainer.running(tmp_path / "other", 2) as again:
            lives = (scene, scene._replace(trainer=again, new=tmp_path / "other"))
            for life in lives:
                trainer = life.trainer
                await sglang_join(life, trainer.group)
                # "1" comes again with the weights of the second life
                for version in ("1", "2"):
                    await post(life, "/pause_generation", {})
                    await life.client.get("/flush_cache")
                    for some in (list(life.stored)[:9], list(life.stored)[9:]):
                        await sglang_send(life, some, flush_cache=False, weight_version=version)
                    await post(life, "/continue_generation", {})
                    assert (await life.client.get("/get_weight_version")).json() == {"weight_version": version}
                    assert await generated(life) == await fresh_tokens(life.new)
                if leaves:
                    await post(life, "/destroy_weights_update_group", {"group_name": trainer.group.name})


@pytest.mark.ci
async def test_miles_brackets_its_update(tmp_path: Path) -> None:
    """As its `UpdateWeightFromDistributed` calls: a selector everywhere, the label once more before the end."""
    async with scene_of(tmp_path) as scene:
        await sglang_join(scene, scene.trainer.group)
        await post(scene, "/pause_generation", {"mode": "retract"})
        assert (await scene.client.get("/flush_cache")).status_code == 200
        await post(scene, "/begin_weight_update", {"selector": "all"})
        assert not (await post(scene, "/begin_weight_update", {"selector": "all"}, 409))["success"]
        names = list(scene.stored)
        told = {"flush_cache": False, "selector": "all", "weight_version": "6"}
        await sglang_send(scene, names[:9], **told)
        for path, field in (("/update_weights_from_disk", "model_path"), ("/update_weights", "weight_dir")):
            await post(scene, path, {field: str(scene.new)}, 409)
        await sglang_send(scene, names[9:], **told)
        # the label of the parts, and no other one
        label = {"new_version": "6", "abort_all_requests": False}
        assert (await post(scene, "/update_weight_version", {**label, "new_version": "7"}, 409))["error"]
        assert (await post(scene, "/update_weight_version", label))["success"]
        await post(scene, "/end_weight_update", {})
        await post(scene, "/continue_generation", {})
        assert (await scene.client.get("/get_weight_version")).json() == {"weight_version": "6"}
        assert await generated(scene) == await fresh_tokens(scene.new)
        # a trainer that left in the middle, and starts anew
        await post(scene, "/begin_weight_update")
        await post(scene, "/destroy_weights_update_group", {"group_name": scene.trainer.group.name})
        assert await generated(scene) == await fresh_tokens(scene.new)
        # nothing is open
        assert not (await post(scene, "/end_weight_update", {}, 400))["success"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [
        {"checksum": "maybe"},
        {"load_format": "flattened_bucket"},
        pytest.param({"names": 5}, marks=pytest.mark.nightly),
        pytest.param({"dtypes": []}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
async def test_a_refused_update_ends_what_began_and_the_trainer_hears_of_it(tmp_path: Path, changes: Any) -> None:
    """It waits in its broadcast meanwhile: this rank leaves, and the broadcast fails."""
    async with scene_of(tmp_path) as scene:
        before = await generated(scene)
        await sglang_join(scene, scene.trainer.group)
        await post(scene, "/begin_weight_update", {"selector": "all"})
        assert (await scene.client.get("/health")).json()["doing"] == "updating"
        await scene.trainer.broadcast()
        await post(
            scene, "/update_weights_from_distributed", {**sglang_body(scene, list(scene.stored)), **changes}, 400
        )
        # nothing was sent, so nothing is broken
        assert (await scene.client.get("/health")).json()["doing"] == "running"
        assert await asyncio.wait_for(scene.trainer.process.wait(), 60) != 0
        assert not (await post(scene, "/end_weight_update", {}, 400))["success"]
        assert await generated(scene) == before


@pytest.mark.ci
async def test_a_refused_part_behind_others_is_told_by_health(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        await sglang_join(scene, scene.trainer.group)
        await post(scene, "/begin_weight_update", {"selector": "all"})
        names = list(scene.stored)
        await sglang_send(scene, names[:9], weight_version="6")
        await scene.trainer.broadcast(names[9:])
        body = sglang_body(scene, names[9:], weight_version="6", checksum="maybe")
        await post(scene, "/update_weights_from_distributed", body, 400)
        assert (await post(scene, "/end_weight_update", {}, 400))["success"] is False
        health = await scene.client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "broken")
        assert await asyncio.wait_for(scene.trainer.process.wait(), 60) != 0


@pytest.mark.ci
async def test_trl_whose_update_is_refused_hears_of_it_by_its_requests(tmp_path: Path) -> None:
    """Its asynchronous GRPO reads no status of what it calls for weights: its own group, which is vLLM's, is refused,
    and so are its tensors; then it finishes, and goes on."""
    async with scene_of(tmp_path) as scene:
        before = await generated(scene)
        init = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
        body = sglang_body(scene, list(scene.stored))
        update = {"names": body["names"], "dtype_names": body["dtypes"], "shapes": body["shapes"], "packed": True}
        for _ in range(2):
            await post(scene, "/init_weight_transfer_engine", {"init_info": init}, 501)
            assert (await scene.client.post("/pause", params={"mode": "keep"})).status_code == 200
            await post(scene, "/start_weight_update", {"is_checkpoint_format": True})
            await post(scene, "/update_weights", {"update_info": update}, 400)
            # only what it finishes is its word for new weights
            assert (await scene.client.get("/health")).status_code == 200
            refused = await scene.client.post("/finish_weight_update")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unfinished")
            await scene.client.post("/resume")
            asked = {"prompt": PROMPT, "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
            answer = await post(scene, "/v1/completions", asked, 503)
            assert "an update was refused" in answer["error"]["message"]
            assert (await scene.client.get("/health")).status_code == 503
            assert (await scene.client.get("/live")).status_code == 200
        # one who reads what it is told: whatever brings weights ends it, and so does whoever gives the group up
        await post(scene, "/destroy_weights_update_group", {"group_name": scene.trainer.group.name})
        assert await generated(scene) == before
        await post(scene, "/start_weight_update", {})
        await post(scene, "/update_weights", {"update_info": update}, 400)
        await post(scene, "/finish_weight_update", {}, 400)
        await post(scene, "/update_weights", {"weight_dir": str(scene.new)})
        assert await generated(scene) == await fresh_tokens(scene.new)
        # a finish that is said twice does no harm
        await post(scene, "/finish_weight_update", {}, 400)
        assert await generated(scene) == await fresh_tokens(scene.new)


@pytest.mark.nightly
async def test_vllms_clients_start_send_and_finish(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        group = scene.trainer.group
        info: dict[str, Any] = {
            "master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": 2,
        }  # fmt: skip
        # a group of vLLM's own
        refused = await post(scene, "/init_weight_transfer_engine", {"init_info": info}, 501)
        assert "pickle" in refused["error"]["message"]
        info |= {"group_name": group.name, "backend": "gloo"}
        await post(scene, "/init_weight_transfer_engine", {"init_info": info})
        await scene.trainer.read("met")
        answer = await scene.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert answer.status_code == 200
        await post(scene, "/start_weight_update", {"is_checkpoint_format": True})
        await post(scene, "/start_weight_update", {"is_checkpoint_format": True}, 409)
        names = list(scene.stored)
        body = sglang_body(scene, names)
        update = {"names": names, "dtype_names": body["dtypes"], "shapes": body["shapes"], "group_name": group.name}
        await scene.trainer.broadcast()
        await post(scene, "/update_weights", {"update_info": update})
        assert (await post(scene, "/finish_weight_update", {"weight_version": "7"}))["weight_version"] == "7"
        await post(scene, "/resume")
        assert (await scene.client.get("/weight_info")).json() == {"weight_version": "7"}
        assert await generated(scene) == await fresh_tokens(scene.new)
        # refused, which leaves the group: a trainer would wait in its broadcasts
        packed = await post(scene, "/update_weights", {"update_info": {**update, "packed": True}}, 400)
        assert packed["error"]["param"] == "packed"


@pytest.mark.nightly
async def test_a_trainer_that_dies_is_told_as_an_engine_that_must_be_updated(tmp_path: Path) -> None:
    async with scene_of(tmp_path, "--die-after", "4") as scene:
        await sglang_join(scene, scene.trainer.group)
        await scene.trainer.broadcast()
        body = sglang_body(scene, list(scene.stored), weight_version="8")
        answer = await post(scene, "/update_weights_from_distributed", body, 503)
        assert not answer["success"]
        assert "load them again" in answer["message"]
        await post(scene, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}, 503)
        assert (await scene.client.get("/ready")).status_code == 503
        # from disk, which replaces everything
        body = {"model_path": str(scene.new), "weight_version": "8"}
        assert (await post(scene, "/update_weights_from_disk", body))["success"]
        assert await generated(scene) == await fresh_tokens(scene.new)


@pytest.mark.ci
async def test_a_refused_tensor_ends_the_group_and_the_answers_say_so(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        name = scene.trainer.group.name
        body = {"names": ["nobody.weight"], "dtypes": ["float32"], "shapes": [[3]], "group_name": name}
        # before anybody joined one
        told = (await post(scene, "/update_weights_from_distributed", body, 400))["message"]
        assert f"no group '{name}' is joined here: nobody has joined it; joined are: none" in told
        await sglang_join(scene, scene.trainer.group)
        other = await post(scene, "/update_weights_from_distributed", {**body, "group_name": "other"}, 400)
        assert f"no group 'other' is joined here: nobody has joined it; joined are: '{name}'" in other["message"]
        told = (await post(scene, "/update_weights_from_distributed", body, 400))["message"]
        assert "nobody.weight" in told
        assert f"group '{name}' was left, since nobody knows what its rank 0 has sent: join it anew" in told
        assert told.count("the weights were not taken") == 1
        # vLLM's path says as much of the group that is no more
        update = {"names": body["names"], "dtype_names": body["dtypes"], "shapes": body["shapes"], "group_name": name}
        told = (await post(scene, "/update_weights", {"update_info": update}, 400))["error"]["message"]
        assert f"no group '{name}' is joined here: it was left when an update by it failed (" in told
        assert "nobody.weight); joined are: none" in told


@pytest.mark.ci
async def test_a_broken_broadcast_is_told_in_plain_words(tmp_path: Path) -> None:
    async with scene_of(tmp_path, "--die-after", "4") as scene:
        await sglang_join(scene, scene.trainer.group)
        await scene.trainer.broadcast()
        body = sglang_body(scene, list(scene.stored), weight_version="8")
        told = (await post(scene, "/update_weights_from_distributed", body, 503))["message"]
        assert told.count("loading new weights failed half-way") == 1
        # no place in the sources of gloo
        assert "third_party" not in told
        assert ".cc:" not in told


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"names": ["one"]}, "names"), ({"load_format": "flattened_bucket"}, "load_format"),
        ({"group_name": "nobody"}, "no group"), ({"dtypes": ["float99"]}, "dtype"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_400_and_changes_nothing(tmp_path: Path, changes: Any, word: str) -> None:
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    async with Engine(engine_config(tmp_path / "old")) as engine:
        transport = httpx2.ASGITransport(app(engine, HttpConfig()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://front", timeout=300) as client:
            body = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "slime", **changes}
            if "names" in changes:
                body["shapes"] = []
            answer = await client.post("/update_weights_from_distributed", json=body)
            assert answer.status_code == 400
            assert word in answer.json()["message"]
        result = await asyncio.wait_for(
            engine.complete(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True, seed=0)), 300
        )
        assert len(result.samples[0].token_ids) == 2
