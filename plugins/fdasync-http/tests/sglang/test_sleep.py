"""The paths that release memory, SGLang's and vLLM's, as trainers that share a GPU with an engine call them."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from fdasync.testing import until

PROMPT = [5, 6, 7, 8, 9]


async def post(scene, path, body=None):
    return await scene.client.post(path, json={} if body is None else body)


def ask(scene, tokens=4, **more):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0}, **more}
    return asyncio.ensure_future(post(scene, "/generate", body))


async def sleeping(scene):
    return (await scene.client.get("/is_sleeping")).json()["is_sleeping"]


async def test_a_training_step_of_slime_releases_updates_and_resumes(scene):
    before = (await ask(scene)).json()["output_ids"]
    new = scene.new_weights("step-1", 77)
    assert (await scene.client.get("/flush_cache")).status_code == 200
    for _ in range(2):
        assert (await post(scene, "/release_memory_occupation")).status_code == 200
    assert await sleeping(scene)
    waiting = ask(scene)
    await until(lambda: scene.generator.load().live == 1)
    # no memory for weights yet
    update = {"model_path": str(new), "weight_version": "step-1"}
    if not scene.generator.load().instances:
        # a router's instance that takes no update is dropped, unless all of them refuse it
        refused = await post(scene, "/update_weights_from_disk", update)
        assert (refused.status_code, refused.json()["success"]) == (409, False)
    assert (await post(scene, "/resume_memory_occupation", {"tags": ["weights"]})).status_code == 200
    assert await sleeping(scene)
    response = await post(scene, "/update_weights_from_disk", update)
    assert (response.status_code, response.json()["success"]) == (200, True)
    assert not waiting.done()
    for _ in range(2):
        tags = {"tags": ["kv_cache", "cuda_graph"]}
        assert (await post(scene, "/resume_memory_occupation", tags)).status_code == 200
    answer = (await waiting).json()
    assert answer["meta_info"]["weight_version"] == "step-1"
    assert answer["output_ids"] != before
    assert not await sleeping(scene)


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("tags", [*list(permutations(["weights", "kv_cache"])), ("weights", "kv_cache", "cuda_graph")])
@pytest.mark.parametrize("at_once", [False, True])
async def test_xtuner_areal_and_roll_release_all_and_name_no_graphs(scene, tags, at_once):
    """xtuner and AReaL resume weights, send theirs, and resume the blocks; ROLL resumes both in one call."""
    before = (await ask(scene)).json()["output_ids"]
    assert (await post(scene, "/release_memory_occupation")).status_code == 200
    waiting = ask(scene)
    for each in [list(tags)] if at_once else [[tag] for tag in tags]:
        assert (await post(scene, "/resume_memory_occupation", {"tags": each})).status_code == 200
    assert not await sleeping(scene)
    assert (await waiting).json()["output_ids"] == before


async def test_weights_that_nobody_pushes_are_those_of_before(scene):
    before = (await ask(scene)).json()["output_ids"]
    await post(scene, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    await post(scene, "/resume_memory_occupation", {})
    assert (await ask(scene)).json()["output_ids"] == before


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("body", [True, False], ids=["in the body", "in the query"])
async def test_vllms_words(scene, body):
    before = (await ask(scene)).json()["output_ids"]
    new = scene.new_weights("step-1", 77)
    if body:
        response = await post(scene, "/sleep", {"level": 2})
    else:
        response = await scene.client.post("/sleep", params={"level": "2", "mode": "keep"})
    assert response.status_code == 200
    assert await sleeping(scene)
    waiting = ask(scene)
    if body:
        assert (await post(scene, "/wake_up", {"tags": ["weights"]})).status_code == 200
    else:
        assert (await scene.client.post("/wake_up", params={"tags": ["weights"]})).status_code == 200
    assert await sleeping(scene)
    assert (await post(scene, "/update_weights", {"weight_dir": str(new)})).status_code == 200
    assert (await scene.client.post("/wake_up", params={"tags": ["kv_cache"]})).status_code == 200
    assert not await sleeping(scene)
    assert (await waiting).json()["output_ids"] != before


async def test_what_runs_at_a_sleep_ends_as_its_dialects_abort_or_goes_on(scene_of):
    async with scene_of(runner={"step_s": 0.01}) as scene:
        running = ask(scene, 200)
        await until(lambda: scene.generator.load().running == 1)
        assert (await scene.client.post("/sleep")).status_code == 200
        answer = await running
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await scene.client.post("/wake_up")).status_code == 200
        running = ask(scene, 20)
        await until(lambda: scene.generator.load().running == 1)
        assert (await post(scene, "/release_memory_occupation")).status_code == 200
        assert not running.done()
        assert (await post(scene, "/resume_memory_occupation")).status_code == 200
        answer = (await running).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == 20


async def test_a_pause_and_a_sleep_end_by_their_own_words(scene):
    await post(scene, "/pause_generation")
    await post(scene, "/release_memory_occupation")
    waiting = ask(scene)
    await post(scene, "/continue_generation")
    assert await sleeping(scene)
    assert not waiting.done()
    await post(scene, "/resume_memory_occupation")
    assert (await waiting).status_code == 200


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("path", "body", "params", "field"),
    [
        ("/sleep", {}, {"level": "3"}, "level"),
        ("/sleep", {}, {"mode": "in_place"}, "mode"),
        ("/sleep", {"level": 7}, {}, ""),
        ("/wake_up", {}, {"tags": ["graphs"]}, "tags"),
        ("/release_memory_occupation", {"tags": ["scheduling"]}, {}, ""),
        ("/resume_memory_occupation", {"tags": "weights"}, {}, ""),
    ],
)
async def test_bad_words_are_named(scene_of, path, body, params, field):
    async with scene_of() as scene:
        response = await scene.client.post(path, json=body, params=params)
        assert response.status_code == 400
        if field:
            assert response.json()["error"]["param"] == field
        assert not await sleeping(scene)
