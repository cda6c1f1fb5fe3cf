"""Updates in parts over HTTP without a trainer: what is refused while one is open, what is said twice, what waits.

`tests/trainers/test_groups.py` plays whole updates with a trainer's broadcasts.
"""

from __future__ import annotations

import asyncio

import pytest
from fdasync_http.failures import Refused
from fdasync_http.paths import CONTROL, USE
from fdasync_http.refused import REASONS
from fdasync_http.sglang.groups import port_of

from fdasync.testing import until

PROMPT = [5, 6, 7, 8, 9]
#: the paths that issue 21 names
WIRE = {
    "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group",
    "/begin_weight_update", "/end_weight_update", "/release_memory_occupation", "/resume_memory_occupation",
    "/pull_weights", "/weights_checker", "/get_weights_by_name", "/sleep", "/wake_up", "/is_sleeping",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info",
    "/init_broadcaster", "/fetch_weights", "/finish_session",
}  # fmt: skip


async def post(scene, path, body=None, status=200):
    answer = await scene.client.post(path, json={} if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json()


def ask(scene, tokens=4):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0}}
    return asyncio.ensure_future(scene.client.post("/generate", json=body))


def ask_vllm(scene, tokens=4):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}}
    return asyncio.ensure_future(scene.client.post("/inference/v1/generate", json=body))


def test_every_path_is_there_and_few_are_refused():
    there = {path.path for path in (*USE, *CONTROL)}
    assert there >= WIRE
    # a pickle, and what no runner has
    assert WIRE & set(REASONS) == {"/init_broadcaster", "/get_weights_by_name"}


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("begin", "end"),
    [("/begin_weight_update", "/end_weight_update"), ("/start_weight_update", "/finish_weight_update")],
)
async def test_a_second_update_while_one_is_open_is_409_and_requests_wait(scene, begin, end):
    folder = scene.new_weights("step-1", 77)
    await post(scene, begin)
    waiting = [ask(scene), ask_vllm(scene)]
    await until(lambda: scene.generator.load().live == 2)
    tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
    join = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 5, "backend": "gloo"}
    for path, body in (
        ("/begin_weight_update", {}),
        ("/start_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": str(folder)}),
        ("/update_weights", {"weight_dir": str(folder)}),
        ("/init_weights_update_group", {"group_name": "g", **join}),
        ("/init_weight_transfer_engine", {"init_info": {"group_name": "g", **join}}),
        ("/update_weight_version", {"new_version": "best", "abort_all_requests": False}),
        ("/sleep?mode=keep", {}),
        ("/release_memory_occupation", {}),
        ("/wake_up", {}),
        ("/resume_memory_occupation", {}),
    ):
        assert "version 0 is in use" in str(await post(scene, path, body, 409))
    assert (await scene.client.get("/ready")).json()["error"]["code"] == "updating"
    assert not any(call.done() for call in waiting)
    # no part came, so nothing is new
    await post(scene, end, {"weight_version": "5"})
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 200
    assert (await scene.client.get("/weight_info")).json() == {"weight_version": "0"}
    # nothing is open any more
    await post(scene, end, {}, 400)
    # a tensor of a group that nobody joined is refused, and the update with it
    await post(scene, begin)
    await post(scene, "/update_weights_from_distributed", {"group_name": "nobody", **tensors}, 400)
    assert (await ask(scene)).status_code == 200


@pytest.mark.parametrize(
    ("begin", "end"),
    [("/begin_weight_update", "/end_weight_update"), ("/start_weight_update", "/finish_weight_update")],
)
async def test_the_end_of_an_update_says_which_weights_are_expected(scene, begin, end):
    await post(scene, begin)
    refused = await post(scene, end, {"expected_weights_id": "77"}, 400)
    assert "expected" in str(refused)
    # it is open still
    await post(scene, end)
    assert (await ask(scene)).status_code == 200


async def test_a_trainer_that_starts_anew_ends_what_it_left_open(scene):
    await post(scene, "/begin_weight_update")
    for _ in range(2):
        assert (await post(scene, "/destroy_weights_update_group", {"group_name": "g"}))["success"]
    assert (await ask(scene)).status_code == 200
    await post(scene, "/begin_weight_update")
    await post(scene, "/end_weight_update")


async def test_what_vllms_clients_run_at_a_sleep_ends_as_their_abort(scene_of):
    async with scene_of(runner={"step_s": 0.01}) as scene:
        running = ask_vllm(scene, 200)
        await until(lambda: scene.generator.load().running == 1)
        await post(scene, "/sleep")
        (choice,) = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"
        waiting = ask_vllm(scene)
        await until(lambda: scene.generator.load().live == 1)
        await post(scene, "/wake_up")
        (choice,) = (await waiting).json()["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 4)


async def test_weights_are_not_read_out(scene_of):
    async with scene_of() as scene:
        for method in ("GET", "POST"):
            answer = await scene.client.request(method, "/get_weights_by_name")
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_served")
            assert "/weights_checker" in answer.json()["error"]["message"]


async def test_the_checker_tells_whether_an_update_brought_the_weights_of_before(scene):
    async def check(action, status=200, **more):
        return await post(scene, "/weights_checker", {"action": action, "selector": "all", **more}, status)

    assert not (await check("compare", 400))["success"]
    for number in (77, 78):
        folder = scene.new_weights(f"step-{number}", number)
        await post(scene, "/update_weights_from_disk", {"model_path": str(folder)})
        told = (await scene.client.get("/weights_checker")).json()
        assert (told["success"], told["per_engine_checksum"]) == (True, f"{number:032x}")
        if number == 77:
            assert (await check("snapshot"))["success"]
            assert (await check("compare", allow_quant_error=False))["success"]
    other = await check("compare", 400)
    assert (other["success"], other["per_engine_checksum"]) == (False, f"{78:032x}")
    assert f"{77:032x}" in other["message"]
    folder = scene.new_weights("back", 77)
    await post(scene, "/update_weights_from_disk", {"model_path": str(folder)})
    assert (await check("compare"))["success"]
    refused = await check("reset_tensors", 501)
    assert "expected_weights_id" in refused["error"]["message"]
    assert (await check("checksum", 400, skip_tensor_list=["lm_head"]))["error"]["param"] == "skip_tensor_list"
    await check("spoil", 400)
    # in a pause too, which stays, and not in an update
    await post(scene, "/pause_generation")
    assert (await check("compare"))["success"]
    await until(lambda: scene.generator.load().doing == "paused")
    await post(scene, "/continue_generation")
    await post(scene, "/begin_weight_update")
    await check("checksum", 409)
    await post(scene, "/end_weight_update")
    await post(scene, "/sleep", {"level": 1})
    await check("checksum", 409)
    await post(scene, "/wake_up")
    assert (await ask(scene)).status_code == 200


@pytest.mark.ci(after=4)
@pytest.mark.parametrize(
    "body",
    [
        {"json": {"weight_dir": "/elsewhere"}},
        {"json": {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "group_name": "g"}}},
        {"json": {"colour": "red"}},
        {"content": b"{"},
        {"json": {"update_info": {"weight_dir": "/elsewhere"}}},
        {"json": {"update_info": {"names": ["w"], "colour": "red"}}},
    ],
    ids=["folder", "group", "key", "no json", "folder inside", "key inside"],
)
async def test_an_update_that_was_refused_is_not_finished(scene, body):
    """TRL reads no status of these calls: its requests tell it."""
    await post(scene, "/start_weight_update")
    assert (await scene.client.post("/update_weights", **body)).status_code == 400
    # a router hears it from its instances
    await until(lambda: scene.generator.load().doing == "running")
    assert (await post(scene, "/finish_weight_update", status=400))["error"]["code"] == "unfinished"
    assert "an update was refused" in (await ask_vllm(scene)).json()["error"]["message"]
    assert (await scene.client.get("/health")).status_code == 503
    await post(scene, "/update_weights", {"weight_dir": str(scene.new_weights("step-1", 77))})
    assert (await ask_vllm(scene)).status_code == 200


async def test_weights_from_a_folder_end_what_was_refused_before(scene):
    await post(scene, "/start_weight_update")
    await post(scene, "/update_weights", {"weight_dir": "/elsewhere"}, 400)
    await post(scene, "/update_weights_from_disk", {"model_path": str(scene.new_weights("step-1", 77))})
    # there is none, and none is unfinished
    assert (await post(scene, "/finish_weight_update", status=400))["error"]["code"] == "bad_input"
    assert (await ask_vllm(scene)).status_code == 200


async def test_keys_of_calls_for_weights_that_change_nothing_are_counted(scene):
    tensors = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "flush_cache": True, "selector": "all"}
    await post(scene, "/update_weights_from_distributed", {**tensors, "torch_empty_cache": False}, 400)
    await post(scene, "/begin_weight_update", {"selector": "all"})
    await post(scene, "/update_weights", {"packed_num_buffers": 2, "version": 3}, 400)
    await post(scene, "/end_weight_update", {"selector": "all"}, 400)
    await post(scene, "/weights_checker", {"action": "compare", "allow_quant_error": False, "selector": "all"}, 400)
    info = {"local_checkpoint_dir": "a", "packed": False, "base_model_path": "b"}
    await post(scene, "/init_weight_transfer_engine", {"init_info": info}, 400)
    assert (await scene.client.get("/server_info")).json()["ignored_fields"] == {
        "/update_weights_from_distributed": {"flush_cache": 1, "selector": 1, "torch_empty_cache": 1},
        "/begin_weight_update": {"selector": 1},
        "/update_weights": {"packed_num_buffers": 1, "version": 1},
        "/end_weight_update": {"selector": 1},
        "/weights_checker": {"allow_quant_error": 1, "selector": 1},
        "/init_weight_transfer_engine": {"init_info.packed": 1, "init_info.base_model_path": 1},
    }


@pytest.mark.parametrize("value", [29500, "29500"])
def test_a_port_is_a_number_or_its_digits(value):
    assert port_of(value) == 29500


@pytest.mark.parametrize("value", ["", "-1", "295000", "tcp"])
def test_what_is_no_port_is_refused(value):
    with pytest.raises(Refused, match="is no port"):
        port_of(value)
