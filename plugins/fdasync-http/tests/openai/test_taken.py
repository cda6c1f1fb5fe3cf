"""What clients send and the reference servers take: it is read as they read it, or ignored, counted and named."""

from __future__ import annotations

import json

import pytest

USER = {"role": "user", "content": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SGLANG, VLLM, SKYRL, ROLLOUT = "/generate", "/inference/v1/generate", "/skyrl/v1/generate", "/v1/rollout"
BODIES = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    TEXT: {"prompt": "a", "max_tokens": 2},
    SGLANG: {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    VLLM: {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    SKYRL: {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    ROLLOUT: {"token_ids": [1], "sampling": {"max_tokens": 2}},
}


async def post(scene, path, body, status=200):
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = await scene.client.post(path, content=content)
    assert answer.status_code == status, answer.text
    return answer


async def ignored_by(scene):
    return (await scene.client.get("/server_info")).json()["ignored_fields"]


async def test_unknown_keys_of_generate_are_ignored_counted_and_named(chat_of):
    """As xtuner sends them; in sampling parameters an unknown key could mean anything."""
    async with chat_of() as (scene, _):
        plain = BODIES[SGLANG]
        for _ in range(2):
            await post(scene, SGLANG, {**plain, "include_stop_str_in_output": True, "token_id": 3, "nothing": None})
        assert await ignored_by(scene) == {SGLANG: {"include_stop_str_in_output": 2, "token_id": 2}}
        answer = await post(scene, SGLANG, {"text": "a", "sampling_params": {"temprature": 1}}, 400)
        assert answer.json()["error"]["param"] == "sampling_params.temprature"
        await post(scene, VLLM, {**BODIES[VLLM], "unheard_of": 1})
        assert (await ignored_by(scene))[VLLM] == {"unheard_of": 1}


async def test_names_of_ignored_fields_take_bounded_memory(chat_of):
    async with chat_of() as (scene, _):
        for at in range(3):
            await post(scene, SGLANG, {**BODIES[SGLANG], **{f"{at}_{n}" + "x" * 500: n for n in range(60)}})
        (told,) = (await ignored_by(scene)).values()
        assert len(told) == 101
        assert told["others"] == 80
        assert max(map(len, told)) == 100


async def test_completions_take_what_rllm_sends(chat_of):
    """rLLM's gateway sends `logprobs: true` and `add_special_tokens` to completions, `return_logprob` to chats."""
    async with chat_of() as (scene, _):
        for value, tops in ((True, 1), (False, None), (0, 0), (None, None), (2, 2)):
            (choice,) = (await post(scene, TEXT, {**BODIES[TEXT], "logprobs": value})).json()["choices"]
            told = choice["logprobs"]
            assert (told is None) == (tops is None)
            if tops:
                assert [len(top) >= tops for top in told["top_logprobs"]] == [True, True]
        for path in (TEXT, CHAT):
            for value in (True, False):
                await post(scene, path, {**BODIES[path], "add_special_tokens": value})
        await post(scene, CHAT, {**BODIES[CHAT], "return_logprob": True, "guided_decoding_backend": "xgrammar"})
        assert await ignored_by(scene) == {CHAT: {"return_logprob": 1, "guided_decoding_backend": 1}}
        # of its own path too
        assert (await post(scene, VLLM, {"token_ids": [1], "sampling_params": {"max_tokens": 1, "logprobs": True}})
                ).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]  # fmt: skip


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("path", sorted(BODIES, key=lambda path: path in (TEXT, SKYRL)))
async def test_each_form_of_json_is_read(chat_of, path):
    async with chat_of() as (scene, _):
        text = json.dumps(BODIES[path]).encode()
        plain = text.replace(b" 2}", b" 2.0}") if path != ROLLOUT else text
        assert path == ROLLOUT or plain != text
        for body in (b"\xef\xbb\xbf" + text, plain, b"\r\n " + text + b"\n"):
            await post(scene, path, body)
        await post(scene, path, text.replace(b" 2}", b" 2.5}"), 400)


NULLABLE = {
    SGLANG: ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "min_new_tokens", "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
             "no_stop_trim", "stop", "stop_token_ids", "json_schema", "regex", "ebnf", "custom_params", "logit_bias",
             "sampling_seed", "stream_interval"),
    VLLM: ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
           "min_tokens", "n", "ignore_eos", "skip_special_tokens", "stop", "stop_token_ids", "logprobs",
           "prompt_logprobs", "logit_bias", "seed", "structured_outputs", "include_stop_str_in_output"),
}  # fmt: skip
TOP = ("stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs",
       "return_routed_experts", "routed_experts_start_len", "return_indexer_topk", "rid", "priority", "extra_key",
       "return_prompt_token_ids", "sampling_params", "stream_options", "return_token_ids", "cache_salt")  # fmt: skip


@pytest.mark.ci
async def test_null_is_the_default_anywhere(chat_of):
    async with chat_of() as (scene, _):
        for path, names in NULLABLE.items():
            body = BODIES[path]
            sampling = {**body["sampling_params"], **dict.fromkeys(names)}
            await post(scene, path, {**body, "sampling_params": sampling})
            await post(scene, path, {**body, **dict.fromkeys(TOP)})
            stops = {**body["sampling_params"], "stop_token_ids": [None, 256]}
            await post(scene, path, {**body, "sampling_params": stops})
        for path in (CHAT, TEXT):
            stream = {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}
            await post(scene, path, {**BODIES[path], "stop_token_ids": [None, 7], "n": None, "stop": None, **stream})
        await post(scene, ROLLOUT, {"token_ids": [1], "sampling": {"max_tokens": 2, "top_p": None, "stop": None}})
        for path, body in (
            ("/pause_generation", {"mode": None}),
            ("/continue_generation", {"torch_empty_cache": None}),
            ("/abort_request", {"abort_all": True, "prefix": None, "rid": None}),
            ("/reset_prefix_cache", {"reset_running_requests": None}),
            ("/abort_requests", {"request_ids": None}),
        ):
            await post(scene, path, body)
        answer = await post(scene, "/update_weights", {"update_info": {"packed": None, "names": None}}, 400)
        assert answer.json()["error"]["param"] == "weight_dir"


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("path", [SGLANG, VLLM, SKYRL, TEXT, CHAT])
@pytest.mark.parametrize(("bias", "other"), [(100, -100), (1000, -1e30), (101.5, -100)])
async def test_biases_have_keys_of_text_and_are_clamped(chat_of, path, bias, other):
    async with chat_of() as (scene, _):
        body = json.loads(json.dumps(BODIES[path]))
        sampling = body.get("sampling_params", body)
        sampling |= {"logit_bias": {"65": bias, "66": other}, "temperature": 0}
        if path in (TEXT, CHAT):
            body["return_token_ids"] = True
        answer = (await post(scene, path, body)).json()
        tokens = answer["output_ids"] if path == SGLANG else answer["choices"][0]["token_ids"]
        assert tokens == [65, 65]


HISTORY = [
    ("", {}), (" ", {}), ("\n", {}), ("null", {}), (None, {}), ({}, {}), ("{}", {}), ('{"x": [1]}', {"x": [1]}),
    ({"x": 1}, {"x": 1}),
]  # fmt: skip


def called_with(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {**BODIES[CHAT], "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}


async def test_messages_of_a_history_are_read_as_agents_send_them(chat_of, scripted):
    tokenizer = scripted(["x"]).tokenizer
    async with chat_of(tokenizer=tokenizer) as (scene, _):
        for arguments, read in HISTORY:
            await post(scene, CHAT, called_with(arguments))
            (call,) = tokenizer.asked[-1]["messages"][1]["tool_calls"]
            assert call["function"]["arguments"] == read
        for arguments in ("[1]", "3", '{"x": ', '"x"', 5, [1], False):
            answer = await post(scene, CHAT, called_with(arguments), 400)
            assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
        for calls in ([], None):
            said = {"role": "Assistant", "content": "a", "tool_calls": calls}
            await post(scene, CHAT, {**BODIES[CHAT], "messages": [{**USER, "role": "USER"}, said]})
            # templates look whether the key is there
            assert tokenizer.asked[-1]["messages"] == [USER, {"role": "assistant", "content": "a"}]


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("asked", "variables"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        pytest.param(
            {"reasoning": {"effort": "none"}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
            marks=pytest.mark.ci,
        ),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"enabled": True, "summary": "auto"}}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": 0.5}, {"reasoning_effort": 0.5}),
        ({"reasoning_effort": None, "reasoning": None}, {}),
        # the client's own word goes before
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True, "thinking": False},
        ),
    ],
)
async def test_how_a_model_thinks(chat_of, scripted, asked, variables):
    tokenizer = scripted(["x"]).tokenizer
    async with chat_of(tokenizer=tokenizer) as (scene, _):
        await post(scene, CHAT, {**BODIES[CHAT], **asked})
        assert tokenizer.asked[-1]["variables"] == variables


class Around:
    """A tokenizer that puts token 1 before a text and token 2 behind it; a letter is a token."""

    def __init__(self, inner):
        self.inner = inner
        # on the instance: from Python 3.12 on `isinstance` does not ask `__getattr__` for a protocol's methods
        for name in ("chat_template", "apply_chat_template", "parse_response"):
            setattr(self, name, getattr(inner, name))

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text):
        return [1, *self.inner.encode(text), 2]


async def test_special_tokens_are_added_where_they_are_asked_for(chat_of, scripted):
    tokenizer = Around(scripted(["x"]).tokenizer)
    plain = tokenizer.inner.encode("abc")
    async with chat_of(tokenizer=tokenizer) as (scene, _):

        async def tokens(**asked):
            return (await post(scene, "/tokenize", asked)).json()["tokens"]

        for adds, want in ((True, [1, *plain, 2]), (None, [1, *plain, 2]), (False, plain)):
            assert await tokens(prompt="abc", add_special_tokens=adds) == want
            assert await tokens(prompt=["abc", ""], add_special_tokens=adds) == [want, [] if want == plain else [1, 2]]
            body = {**BODIES[TEXT], "prompt": "abc", "add_special_tokens": adds, "return_token_ids": True}
            (choice,) = (await post(scene, TEXT, body)).json()["choices"]
            assert choice["prompt_token_ids"] == want
            # without the ids in its answer, the engine has the same prompt
            usage = (await post(scene, TEXT, {**body, "return_token_ids": False})).json()["usage"]
            assert usage["prompt_tokens"] == len(want)
        chat = tokenizer.inner.encode("<user>hi<assistant>")
        for adds, want in ((True, [1, *chat, 2]), (None, chat), (False, chat)):
            assert await tokens(messages=[USER], add_special_tokens=adds) == want
            answer = await post(scene, CHAT, {**BODIES[CHAT], "add_special_tokens": adds, "return_token_ids": True})
            assert answer.json()["prompt_token_ids"] == want
