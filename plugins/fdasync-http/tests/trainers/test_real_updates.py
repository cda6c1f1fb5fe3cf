"""Weights over HTTP with nothing in between but processes: `fdasync http`, its engine, its workers, and trainers.

One server takes what trainers bring one after the other: broadcasts by SGLang's and by vLLM's paths, deltas of folders,
a pull of what is published. After each its tokens are those of an engine that was started on these weights. With one
worker, with two ranks, and with two instances.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from fdasync_transformers import weights_fingerprint, write_delta
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from safetensors.numpy import load_file
from trainers_process import front

sys.path.insert(0, str(Path(__file__).parents[3] / "fdasync-transformers" / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pulls"))

import publisher
from group_play import PROMPT, Trainer, engine_config, fresh_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.nightly

NAMES = ("old", "sglang", "vllm", "delta", "more", "pulled")


class Server:
    """A server, and the checkpoints that trainers bring to it.

    Attributes:
        workers: processes that hold weights, each a rank of a trainer's group.
        weights: of the checkpoints, by name, as numpy has them.
        models: the same, as models.
    """

    def __init__(self, client: httpx2.AsyncClient, home: Path, workers: int, models: dict[str, Any]) -> None:
        self.client, self.home, self.workers, self.models = client, home, workers, models
        self.weights = {name: load_file(home / name / "model.safetensors") for name in NAMES}

    async def post(self, path: str, body: Any = None) -> Any:
        answer = await self.client.post(path, json={} if body is None else body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def tokens(self) -> tuple[int, ...]:
        sampling = {"temperature": 0.0, "max_new_tokens": 6}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = await self.post("/generate", body)
        return tuple(token for _, token, _ in answer["meta_info"]["output_token_logprobs"])

    async def serves(self, name: str, version: str) -> None:
        """Its tokens are those of this checkpoint."""
        assert (await self.client.get("/weight_info")).json() == {"weight_version": version}
        assert await self.tokens() == await fresh_tokens(self.home / name)

    def fingerprint(self, name: str) -> str:
        return weights_fingerprint(self.models[name], dtype="float32").weights_id

    def group(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1", "master_port": trainer.group.port, "rank_offset": 1,
            "world_size": 1 + self.workers, "group_name": trainer.group.name, "backend": "gloo",
        }  # fmt: skip

    def described(self, name: str) -> dict[str, Any]:
        tensors = self.weights[name]
        return {
            "names": list(tensors), "dtypes": [str(one.dtype) for one in tensors.values()],
            "shapes": [list(one.shape) for one in tensors.values()],
        }  # fmt: skip


@asynccontextmanager
async def server_of(home: Path, instances: int, ranks: int) -> AsyncIterator[Server]:
    models = {name: make_tiny_checkpoint(home / name, "qwen3_moe", seed) for seed, name in enumerate(NAMES)}
    for name in ("published", "pulls"):
        (home / name).mkdir()
    config = msgspec.to_builtins(engine_config(home / "old"))
    kept = ("runner_config", "block_tokens", "num_blocks", "max_context_tokens", "max_running", "max_step_tokens")
    file = home / "engine.json"
    file.write_text(json.dumps({**{name: config[name] for name in kept}, "tensor_parallel": ranks}))
    options = ["--model", home / "old", "--config", file, "--weights-root", home, "--pulls-root", home / "pulls"]
    async with (
        front("--mixed", str(instances), *map(str, options)) as url,
        httpx2.AsyncClient(base_url=url, timeout=300) as client,
    ):
        yield Server(client, home, instances * ranks, models)


async def broadcast_by_sglangs_paths(server: Server) -> None:
    async with Trainer.running(server.home / "sglang", 1 + server.workers) as trainer:
        assert (await server.post("/init_weights_update_group", server.group(trainer)))["success"]
        await trainer.read("met")
        await server.post("/pause_generation", {"mode": "in_place"})
        waiting = asyncio.ensure_future(server.tokens())
        await trainer.broadcast()
        body = {
            **server.described("sglang"), "group_name": trainer.group.name, "weight_version": "1", "flush_cache": True,
            "expected_weights_id": server.fingerprint("sglang"),
        }  # fmt: skip
        assert (await server.post("/update_weights_from_distributed", body))["success"]
        await trainer.read("sent")
        assert not waiting.done()
        await server.post("/continue_generation")
        assert await waiting == await fresh_tokens(server.home / "sglang")
        assert (await server.post("/destroy_weights_update_group", {"group_name": trainer.group.name}))["success"]
    await server.serves("sglang", "1")


async def broadcast_by_vllms_paths(server: Server) -> None:
    async with Trainer.running(server.home / "vllm", 1 + server.workers) as trainer:
        await server.post("/init_weight_transfer_engine", {"init_info": server.group(trainer)})
        await trainer.read("met")
        await server.post("/pause?mode=keep&clear_cache=false")
        await server.post("/start_weight_update", {"is_checkpoint_format": True})
        told = server.described("vllm")
        for some in (slice(0, 9), slice(9, None)):
            await trainer.broadcast(told["names"][some])
            part = {"names": told["names"][some], "dtype_names": told["dtypes"][some], "shapes": told["shapes"][some]}
            await server.post("/update_weights", {"update_info": {**part, "group_name": trainer.group.name}})
            await trainer.read("sent")
        done = {"weight_version": "2", "expected_weights_id": server.fingerprint("vllm")}
        assert (await server.post("/finish_weight_update", done))["weight_version"] == "2"
        await server.post("/resume")
    await server.serves("vllm", "2")


async def deltas_of_folders(server: Server) -> None:
    """Each to the weights before, by a path of each dialect."""
    before = "vllm"
    for name, version, path in (("delta", "3", "/update_weights_from_disk"), ("more", "4", "/update_weights")):
        state, old = server.models[name].state_dict(), server.models[before].state_dict()
        changed = {key: tensor for key, tensor in state.items() if not tensor.equal(old[key])}
        folder = server.home / f"delta-{version}"
        base, result = server.fingerprint(before), server.fingerprint(name)
        write_delta(folder, changed, base=base, result=result)
        field = "model_path" if path == "/update_weights_from_disk" else "weight_dir"
        await server.post(path, {field: str(folder), "weight_version": version, "expected_weights_id": result})
        await server.serves(name, version)
        # of other weights than those in use it is refused, and they stay
        again = await server.client.post(path, json={field: str(folder), "weight_version": "next"})
        assert again.status_code == 400, again.text
        await server.serves(name, version)
        before = name


async def pulled(server: Server) -> None:
    publisher.slime(server.home / "published", 1, server.weights["old"], server.weights["pulled"])
    local = server.home / "pulls" / "local"
    body = {"local_checkpoint_dir": str(local), "source_dir": str(server.home / "published")}
    for version in (0, 1, 1):
        assert (await server.post("/pull_weights", {**body, "target_version": version}))["success"]
    # nothing is loaded by it
    await server.serves("more", "4")
    loaded = await server.post("/update_weights_from_disk", {"model_path": str(local), "weight_version": "5"})
    assert loaded["success"]
    await server.serves("pulled", "5")


@pytest.mark.parametrize(("instances", "ranks"), [(1, 1), (1, 2), (2, 1)])
async def test_a_server_takes_weights_by_every_way(tmp_path: Path, instances: int, ranks: int) -> None:
    async with server_of(tmp_path, instances, ranks) as server:
        await server.serves("old", "0")
        await broadcast_by_sglangs_paths(server)
        await broadcast_by_vllms_paths(server)
        await deltas_of_folders(server)
        await pulled(server)
