"""Streams of several samples, on every path that streams: each sample ends when it has ended."""

from __future__ import annotations

import asyncio
import json

import pytest

PROMPT = [5, 6, 7, 8, 9, 10]
# samples of this seed end after 200, 6, 65 and 114 tokens
LENGTHS = [200, 6, 65, 114]
SAMPLING = {"n": 4, "stop_token_ids": [36]}
NATIVE = {**SAMPLING, "max_new_tokens": 200, "sampling_seed": 3}
OPENAI = {"model": "any", **SAMPLING, "max_tokens": 200, "seed": 3, "return_token_ids": True}
BODIES = {
    "/generate": {"input_ids": PROMPT, "sampling_params": NATIVE, "return_routed_experts": True},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200, "seed": 3}},
    "/v1/completions": {"prompt": PROMPT, **OPENAI, "routed_experts_prompt_start": 0},
    "/v1/chat/completions": {"input_ids": PROMPT, **OPENAI, "routed_experts_prompt_start": 0},
}


def told_by(path, event):
    """Number of the sample, all of its tokens or the new ones, how it ended, and its rows."""
    if path == "/generate":
        meta = event["meta_info"]
        return event["index"], event["output_ids"], meta["finish_reason"], meta.get("routed_experts")
    (choice,) = event["choices"]
    return choice["index"], choice.get("token_ids", []), choice["finish_reason"], choice.get("routed_experts")


# after so many steps more the next sample has ended, and the one behind it cannot have
STEPS = [35, 55, 50]


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("path", BODIES)
async def test_each_sample_ends_when_it_has_ended(kind, scene_of, path):
    ends, tokens = [], {index: [] for index in range(4)}
    async with scene_of(kind, held=True) as scene:
        scene.steps.hold()
        # an answer begins with its first event
        let = asyncio.ensure_future(scene.steps.let(STEPS[0]))
        async with scene.client.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                index, new, reason, rows = told_by(path, json.loads(line.removeprefix("data: ")))
                assert index not in ends, "something follows the end of a sample"
                tokens[index] = new if path == "/generate" else tokens[index] + new
                assert (rows is not None) == (reason is not None)
                if reason is None:
                    continue
                ends.append(index)
                await let
                # the others go on only now
                if len(ends) < len(STEPS):
                    let = asyncio.ensure_future(scene.steps.let(STEPS[len(ends)]))
                else:
                    scene.steps.release()
    assert ends == [1, 2, 3, 0]
    assert [len(tokens[index]) for index in range(4)] == LENGTHS
