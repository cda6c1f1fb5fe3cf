"""A trainer that restarts against a running server, over HTTP: it begins at version 1 again, by folder.

Every dialect that names a version; an engine, and a router of two instances. `test_groups.py` plays it by group.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from safetensors import safe_open

from fdasync import SamplingParams, WeightSpan
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import expected

PROMPT = [5, 6, 7, 8, 9]
PATHS = {"/update_weights_from_disk": "model_path", "/update_weights": "weight_dir"}


async def post(scene, path, body=None):
    answer = await scene.client.post(path, json={} if body is None else body)
    assert answer.status_code == 200, answer.text
    return answer


async def spans_of(scene, tmp_path):
    """As `/v1/rollout` tells them."""
    body = {"token_ids": PROMPT, "sampling": {"max_tokens": 4, "temperature": 0.0}}
    (tmp_path / "rollout").write_bytes((await post(scene, "/v1/rollout", body)).content)
    with safe_open(tmp_path / "rollout", "numpy") as file:
        tokens = tuple(file.get_tensor("token_ids").tolist())
        return tokens, msgspec.json.decode(file.metadata()["weight_versions"], type=list[WeightSpan])


@pytest.mark.ci
@pytest.mark.parametrize("path", PATHS)
async def test_it_begins_at_version_1_again(scene, tmp_path, path):
    folder = scene.new_weights("current", 77)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    told = []
    for life in range(2):
        for version in ("1", "2", "2", "3"):
            # the trainer writes to one place, time and again
            number = 100 * life + int(version)
            (folder / "weights.json").write_text(json.dumps({"weights_id": number}))
            await post(scene, "/pause_generation")
            await scene.client.get("/flush_cache")
            await post(scene, path, {PATHS[path]: str(folder), "weight_version": version})
            await post(scene, "/continue_generation")
            assert (await scene.client.get("/get_weight_version")).json() == {"weight_version": version}
            tokens, (span,) = await spans_of(scene, tmp_path)
            oracle = Oracle(msgspec.structs.replace(scene.oracle.config, weights_id=number))
            assert tokens == expected(PROMPT, params, 0, oracle).token_ids
            assert (span.version, span.weights_id) == (version, f"{number:032x}")
            told.append(span.weights_id)
    assert len(set(told)) == 6


async def test_a_label_that_other_weights_had_may_be_given(scene, tmp_path):
    await post(scene, "/update_weights_from_disk", {"model_path": str(scene.new_weights("a", 77)), "weight_version": 5})
    before, (span,) = await spans_of(scene, tmp_path)
    await post(scene, "/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    after, (renamed,) = await spans_of(scene, tmp_path)
    assert (span.version, renamed.version) == ("5", "0")
    assert (before, span.weights_id) == (after, renamed.weights_id)
