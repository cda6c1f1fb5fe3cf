"""Keys and words of the calls for weights, memory and pauses: what is not known is refused by name, with what is.

A key that is written wrong must not mean all that is there: `{"tag": ["kv_cache"]}` once put every part to sleep. What
clients of SGLang and vLLM send besides (contracts.md, 2.4, 3.2) is taken.
"""

from __future__ import annotations

import pytest

UNKNOWN = [
    ("/release_memory_occupation", {"tag": ["kv_cache"]}, "tag", "tags"),
    ("/resume_memory_occupation", {"tag": ["kv_cache"]}, "tag", "tags"),
    ("/sleep", {"lvl": 1}, "lvl", "level, mode"),
    ("/sleep?lvl=1", {}, "lvl", "level, mode"),
    ("/sleep?tags=weights", {}, "tags", "level, mode"),
    ("/wake_up", {"tag": ["weights"]}, "tag", "tags"),
    ("/wake_up?tag=weights", {}, "tag", "tags"),
    ("/pause?mod=keep", {}, "mod", "mode, clear_cache"),
    ("/release_memory_occupation?tags=weights", {}, "tags", "none"),
    ("/flush_cache?timeout_s=3", {}, "timeout_s", "timeout"),
    ("/update_weights_from_disk", {"model_path": "/w", "version": "7"}, "version", "weight_version"),
    (
        "/update_weights_from_distributed",
        {"names": [], "dtypes": [], "shapes": [], "group": "g"},
        "group",
        "group_name",
    ),
    ("/init_weights_update_group", {"master_addr": "127.0.0.1"}, "master_addr", "master_address"),
    ("/destroy_weights_update_group", {"group": "g"}, "group", "group_name"),
    ("/begin_weight_update", {"mode": "keep"}, "mode", "selector"),
    ("/end_weight_update", {"version": "7"}, "version", "weight_version"),
    ("/update_weight_version", {"new_version": "7", "abort": True}, "abort", "abort_all_requests"),
    ("/weights_checker", {"act": "checksum"}, "act", "action"),
    ("/pull_weights", {"local_dir": "/w"}, "local_dir", "local_checkpoint_dir"),
    ("/fetch_weights", {"target_version": 1, "dir": "/w"}, "dir", "sync_dir"),
    ("/init_weight_transfer_engine", {"init_info": {"group_name": "g", "port": 1}}, "init_info.port", "master_port"),
    ("/start_weight_update", {"checkpoint_format": True}, "checkpoint_format", "is_checkpoint_format"),
    ("/update_weights", {"weights_dir": "/w"}, "weights_dir", "weight_dir"),
    ("/update_weights", {"update_info": {"dtypes": []}}, "update_info.dtypes", "dtype_names"),
    ("/finish_weight_update", {"version": "7"}, "version", "weight_version"),
]


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(("path", "body", "unknown", "known"), UNKNOWN)
async def test_an_unknown_key_is_refused_by_name_and_nothing_happens(scene_of, path, body, unknown, known):
    async with scene_of() as scene:
        answer = await scene.client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (unknown, "unknown_key")
        assert error["message"].startswith(f"{unknown}: ")
        assert known in error["message"].rpartition(": ")[2]
        assert scene.generator.load().doing == "running"
        assert scene.generator.facts().weight_version == "0"


_SGLANG = {"rid": None, "http_worker_ipc": None}
# of contracts.md, and of the objects that clients of these servers send as they are
TAKEN = [
    ("/update_weights_from_disk", {
        **_SGLANG, "model_path": "/w", "load_format": None, "weight_version": None, "abort_all_requests": False,
        "flush_cache": True, "keep_pause": False, "is_async": False, "token_step": 0, "manifest": None,
        "torch_empty_cache": False, "recapture_cuda_graph": False, "abort_all_request": True,
    }),
    ("/update_weights_from_distributed", {
        **_SGLANG, "names": [], "dtypes": [], "shapes": [], "group_name": "g", "flush_cache": False,
        "weight_version": "1", "load_format": None, "abort_all_requests": False, "torch_empty_cache": False,
    }),
    ("/release_memory_occupation", {**_SGLANG, "tags": None}),
    ("/resume_memory_occupation", {**_SGLANG, "tags": ["weights", "kv_cache", "cuda_graph"]}),
    ("/destroy_weights_update_group", {**_SGLANG, "group_name": "g"}),
    ("/begin_weight_update", {"selector": {"modules": ["a"]}}),
    ("/end_weight_update", {"selector": None}),
    ("/weights_checker", {"action": "checksum", "allow_quant_error": True, "selector": "all"}),
    ("/init_weight_transfer_engine", {"init_info": {
        "base_model_path": "/m", "local_checkpoint_dir": "/w", "cloud_download_workers": 4,
        "checkpoint_load_format": "a", "multi_thread_safetensors_max_workers": 8, "override_existing_receiver": True,
    }}),
    ("/fetch_weights", {"target_version": 1, "version": 1, "sync_dir": None, "uri": None, "update_kind": "dense"}),
    ("/update_weights", {"update_info": {
        "target_version": 1, "version": 1, "sync_dir": None, "uri": None, "update_kind": "dense",
    }}),
    ("/update_weights", {"update_info": {
        "names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "packed": False, "packed_buffer_size_bytes": 1,
        "packed_num_buffers": 2,
    }}),
    ("/update_weights", {"weight_dir": "/w"}),
]  # fmt: skip


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(("path", "body"), TAKEN)
async def test_what_clients_send_besides_is_taken(scene_of, path, body):
    async with scene_of() as scene:
        answer = await scene.client.post(path, json=body)
        if answer.status_code >= 400:
            # for what it means
            told = answer.json()
            assert "error" not in told or told["error"]["code"] != "unknown_key", answer.text


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/abort_request", "rid: is missing; give it, or abort_all"),
        ("/finish_session", "session_id: is missing in the query"),
        (
            "/update_weights",
            "weight_dir: is missing; give a checkpoint folder, or tensors of a group in names, dtype_names and shapes",
        ),
        ("/sleep?level=00", "level: '00' is none of 0, 1, 2"),
    ],
)
async def test_what_is_missing_is_named_once(scene_of, path, told):
    async with scene_of() as scene:
        answer = await scene.client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)


async def test_a_transfer_of_vllms_own_is_refused_for_what_it_is(scene_of):
    async with scene_of() as scene:
        for info in ({"master_addr": "10.0.0.1", "model_dtype_str": "bfloat16"}, {"trainer_actor_name": "a"}):
            answer = await scene.client.post("/init_weight_transfer_engine", json={"init_info": info})
            assert answer.status_code == 501
            assert "pickle" in answer.json()["error"]["message"]


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    ("path", "body", "param", "known"),
    [
        ("/release_memory_occupation", {"tags": ["graphs"]}, "tags[0]", "weights, kv_cache, cuda_graph"),
        ("/resume_memory_occupation", {"tags": ["weights", "scheduling"]}, "tags[1]", "weights, kv_cache, cuda_graph"),
        ("/wake_up", {"tags": ["graphs"]}, "tags[0]", "weights, kv_cache, cuda_graph, scheduling"),
        ("/wake_up?tags=graphs", {}, "tags", "weights, kv_cache, cuda_graph, scheduling"),
        ("/weights_checker", {"action": "spoil"}, "action", "checksum, snapshot, compare, reset_tensors"),
        ("/sleep", {"level": 7}, "level", "0, 1, 2"),
        ("/sleep?level=7", {}, "level", "0, 1, 2"),
        ("/sleep?level=00", {}, "level", "0, 1, 2"),
        ("/sleep", {"mode": "in_place"}, "mode", "abort, wait, keep"),
        ("/pause_generation", {"mode": "keep"}, "mode", "abort, retract, in_place"),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "mpi"},
            "backend", "gloo, nccl",
        ),
    ],
)  # fmt: skip
async def test_a_word_that_is_none_of_the_good_ones_is_told_them(scene_of, path, body, param, known):
    async with scene_of() as scene:
        answer = await scene.client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        told = error["message"].replace("'", "").rpartition(" is none of ")[2] or error["message"]
        assert [word for word in known.split(", ") if word not in told] == []
        assert scene.generator.load().doing == "running"


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("kind", ["engine", "fleet"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank_offset": 0}, ["group.rank: ", "is 0", "1 to 65536"]),
        ({"master_address": "10.0.0.1"}, ["group.address: ", "10.0.0.1", "weights_interface"]),
        ({"world_size": 2, "rank_offset": 2}, ["group.world_size: ", "the trainer is rank 0"]),
        # of a runner that joins none
        ({}, ["the weights were not taken: ", "joins no process group"]),
    ],
)
async def test_a_refused_group_is_told_the_limit_and_the_way_out(scene_of, kind, changes, words):
    body = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 9, "backend": "gloo"}
    async with scene_of(kind) as scene:
        answer = await scene.client.post("/init_weights_update_group", json={**body, **changes})
        assert answer.status_code == 400
        told = answer.json()["message"]
        assert [word for word in words if word not in told] == [], told
        assert [word for word in words if told.count(word) > 1] == [], told
