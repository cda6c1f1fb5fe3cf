"""Errors of the engine name the field that the client sent, in every dialect, whole and streamed."""

from __future__ import annotations

import msgspec
import pytest

from fdasync.runner.synthetic import SyntheticRunner

IDS = {"input_ids": [1, 2, 3]}
NATIVE = {"token_ids": [1, 2, 3]}
SGLANG, VLLM, CHAT, TEXT = "/generate", "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
ROLLOUT = "/v1/rollout"

# what clients send, and the field that the refusal names
REFUSED = [
    (SGLANG, {**IDS, "sampling_params": {"max_new_tokens": 10**6}}, "sampling_params.max_new_tokens"),
    (SGLANG, {**IDS, "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    (SGLANG, {**IDS, "sampling_params": {"sampling_seed": -1}}, "sampling_params.sampling_seed"),
    (SGLANG, {**IDS, "sampling_params": {"logit_bias": {"100000": 1}}}, "sampling_params.logit_bias"),
    (SGLANG, {**IDS, "sampling_params": {"min_new_tokens": 500}}, "sampling_params.min_new_tokens"),
    (SGLANG, {**IDS, "sampling_params": {"regex": "nonsense"}}, "sampling_params.regex"),
    (SGLANG, {**IDS, "return_logprob": True, "logprob_start_len": 7}, "logprob_start_len"),
    (SGLANG, {**IDS, "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
    (SGLANG, {**IDS, "rid": ""}, "rid"),
    (SGLANG, {**IDS, "extra_key": "x" * 10_000}, "extra_key"),
    (SGLANG, {**IDS, "cache_salt": "x" * 10_000}, "cache_salt"),
    (SGLANG, {**IDS, "return_routed_experts": True, "routed_experts_start_len": 9}, "routed_experts_start_len"),
    (SGLANG, {"text": ""}, "text"),
    (VLLM, {"token_ids": []}, "token_ids"),
    (VLLM, {**NATIVE, "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    (VLLM, {**NATIVE, "sampling_params": {"logprobs": 10**6}}, "sampling_params.logprobs"),
    (VLLM, {**NATIVE, "sampling_params": {"prompt_logprobs": 10**6}}, "sampling_params.prompt_logprobs"),
    (VLLM, {**NATIVE, "sampling_params": {"routed_experts_prompt_start": 9}},
     "sampling_params.routed_experts_prompt_start"),
    (VLLM, {**NATIVE, "sampling_params": {"structured_outputs": {"regex": "nonsense"}}},
     "sampling_params.structured_outputs.regex"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": "a", "max_completion_tokens": 10**6}, "max_completion_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    (TEXT, {"prompt": "a", "logprobs": 10**6}, "logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 10**6}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "guided_regex": "nonsense"}, "guided_regex"),
    (TEXT, {"prompt": ["a", "b"], "structured_outputs": {"regex": "nonsense"}}, "structured_outputs.regex"),
    (TEXT, {"prompt": "a", "rid": "x" * 10_000}, "rid"),
    (CHAT, {**IDS, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (CHAT, {"input_ids": []}, "input_ids"),
    (CHAT, {**IDS, "extra_key": "x" * 10_000}, "extra_key"),
    (CHAT, {**IDS, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {**IDS, "json_schema": {}}, "json_schema"),
    (ROLLOUT, {"token_ids": []}, "token_ids"),
    (ROLLOUT, {"text": ""}, "text"),
    (ROLLOUT, {**NATIVE, "sampling": {"temperature": -1}}, "sampling.temperature"),
    (ROLLOUT, {**NATIVE, "sampling": {"temprature": 1}}, "sampling.temprature"),
    (ROLLOUT, {**NATIVE, "sampling": {"max_tokens": 4, "grammar": {"kind": "regex", "text": "x"}}},
     "sampling.grammar"),
    (ROLLOUT, {**NATIVE, "sampling": {"max_tokens": 4}, "start": 9}, "start"),
]  # fmt: skip
CANNOT = [
    (SGLANG, {**IDS, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    (SGLANG, {**IDS, "sampling_params": {"regex": "%2"}}, "sampling_params.regex"),
    (VLLM, {**NATIVE, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
    (TEXT, {"prompt": "a", "ebnf": "%2"}, "ebnf"),
    (ROLLOUT, {**NATIVE, "sampling": {"prompt_logprobs_start": 0}}, "sampling.prompt_logprobs_start"),
]


async def named(client, path: str, body: dict, param: str) -> str:
    """The message of the refusal, which names this field and no field of the engine's own."""
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert f"{param}: " in error["message"]
    assert not {"prompt_logprobs_start", "grammar:"} & set(error["message"].split())
    return error["message"]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_an_error_names_what_was_sent(scene_of, subtests, kind):
    async with scene_of(kind) as scene:
        for path, body, param in REFUSED:
            with subtests.test(path=path, param=param):
                await named(scene.client, path, body, param)
                if path in (SGLANG, VLLM, TEXT, CHAT):
                    await named(scene.client, path, {**body, "stream": True}, param)


@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_so_does_one_of_a_runner_that_cannot(scene_of, subtests, monkeypatch, kind):
    opened = SyntheticRunner.open

    async def without(self):
        return msgspec.structs.replace(await opened(self), grammars=False, scores_prompts=False)

    monkeypatch.setattr(SyntheticRunner, "open", without)
    async with scene_of(kind) as scene:
        for path, body, param in CANNOT:
            with subtests.test(path=path, param=param):
                assert "runner" in await named(scene.client, path, body, param)


async def test_an_error_that_mentions_other_fields_mentions_the_clients(scene_of):
    async with scene_of() as scene:
        sampling = {"regex": "%2", "min_new_tokens": 2}
        told = await named(scene.client, SGLANG, {**IDS, "sampling_params": sampling}, "sampling_params.regex")
        assert "sampling_params.min_new_tokens" in told
        # numbered, where there are several
        bodies = {"input_ids": [[1], [2]], "sampling_params": [{}, {"top_p": 7}]}
        await named(scene.client, SGLANG, bodies, "sampling_params[1].top_p")


async def test_a_grammar_that_breaks_names_its_field(scene_of):
    async with scene_of() as scene:
        body = {**IDS, "sampling_params": {"regex": "%2!4", "max_new_tokens": 30}}
        answer = await scene.client.post(SGLANG, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "grammar_failed", "sampling_params.regex")
