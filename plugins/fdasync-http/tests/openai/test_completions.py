"""`/v1/completions` by OpenAI's client, and with the fields of vLLM and SGLang beside."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest

from fdasync import SamplingParams
from fdasync.testing import expected

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SEEDED = {"model": "any", "max_tokens": 12, "seed": 7}


def want(scene, prompt=PROMPT, index=0, **params):
    made = SamplingParams(**{"max_tokens": 12, "seed": 7, **params})
    return list(expected(prompt, made, index, scene.oracle).token_ids)


def text_of(scene, token_ids):
    return scene.generator.tokenizer.decode(token_ids)


async def raw(scene, **body):
    response = await scene.client.post("/v1/completions", json={**SEEDED, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_whole_completion(chat_of):
    async with chat_of() as (scene, openai):
        made = await openai.completions.create(prompt=PROMPT, **SEEDED)
        assert made.object == "text_completion"
        assert made.id.startswith("cmpl-")
        assert made.created > 1_700_000_000
        assert made.model == "any"
        (choice,) = made.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
        assert choice.text == text_of(scene, want(scene))
        usage = made.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 12, 19)
        again = await openai.completions.create(prompt=PROMPT, **SEEDED)
        assert again.usage.prompt_tokens_details.cached_tokens == 4
        salted = await openai.completions.create(prompt=PROMPT, **SEEDED, extra_body={"cache_salt": "x"})
        assert salted.usage.prompt_tokens_details.cached_tokens == 0
        short = await openai.completions.create(model="any", prompt="letters")
        assert short.usage.completion_tokens == 16


async def chunks_of(openai, **body):
    async for chunk in await openai.completions.create(**body, stream=True):
        yield chunk


async def test_a_stream_is_the_whole_in_pieces(kind, chat_of):
    async with chat_of(kind, held=True) as (scene, openai):
        whole = await raw(scene, prompt=PROMPT, logprobs=2)
        scene.steps.hold()
        chunks = chunks_of(
            openai, prompt=PROMPT, **SEEDED, logprobs=2, stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        events = [event async for event in scene.steps.each(chunks, 12)]
        last, usage = [chunk async for chunk in chunks]
        check_pieces(scene, whole, events, last, usage)


def check_pieces(scene, whole, events, last, usage):
    chunks = [*events, last, usage]
    assert usage.choices == []
    assert usage.usage.total_tokens == 19
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in events] == [None] * len(events)
    assert last.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].text for chunk in (*events, last)) == whole["choices"][0]["text"]
    assert [list(chunk.choices[0].token_ids) for chunk in events] == [[token] for token in want(scene)]
    assert events[0].choices[0].prompt_token_ids == PROMPT
    assert not hasattr(events[1].choices[0], "prompt_token_ids")
    told = whole["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [one for chunk in events for one in getattr(chunk.choices[0].logprobs, name)]
        if name == "top_logprobs":
            assert [pytest.approx(top) for top in joined] == told[name]
        else:
            assert joined == (pytest.approx(told[name]) if name == "token_logprobs" else told[name])


@pytest.mark.parametrize("ask", ["chat", "text", "ids"])
async def test_every_event_tells_the_usage_so_far(chat, ask):
    """As `guidellm` asks for it."""
    _, openai = chat
    sent = {"model": "any", "stream": True, "max_tokens": 6, "n": 2, "extra_body": {"return_token_ids": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    if ask == "chat":
        stream = await openai.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **sent)
    else:
        stream = await openai.completions.create(prompt=PROMPT if ask == "ids" else "abc", **sent)
    told, so_far, counts = [], 0, []
    async for chunk in stream:
        told.append(chunk.usage)
        so_far += sum(len(getattr(choice, "token_ids", None) or ()) for choice in chunk.choices)
        counts.append(so_far)
    assert [usage.completion_tokens for usage in told] == counts
    # an event is of one sample: the first of them cannot tell the usage of both
    assert counts[0] <= 6
    assert counts[-1] == 12
    assert len({usage.prompt_tokens for usage in told}) == 1
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told)


LINE_ENDS = "\x85\u2028\u2029\x0b\x1c\r\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate"])
async def test_an_event_is_one_line_for_clients_that_cut_at_every_line_end(chat_of, scripted, path):
    """`httpx` cuts as `str.splitlines` does; `guidellm` and others read streams through it."""
    model = scripted(["a" + LINE_ENDS, LINE_ENDS + "z"])
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    sampling = {"stop_token_ids": model.stop_token_ids, "max_tokens": 9}
    body = {"stream": True, "seed": model.seed, **sampling}
    if path == "/generate":
        told = {"sampling_seed": model.seed, "stop_token_ids": model.stop_token_ids, "max_new_tokens": 9}
        body = {"input_ids": prompt, "stream": True, "sampling_params": told}
    elif path.startswith("/inference"):
        body = {"token_ids": prompt, "stream": True, "output_mode": "text",
                "sampling_params": {**sampling, "seed": model.seed}}  # fmt: skip
    elif path == "/v1/completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    async with chat_of(tokenizer=model.tokenizer) as (scene, _):
        said = ""
        async with scene.client.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if path == "/generate":
                    said = event["text"]
                else:
                    choice = event["choices"][0]
                    said += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert said.strip("\r\n") == ("a" + LINE_ENDS + LINE_ENDS + "z").strip("\r\n")


async def test_a_stream_ends_with_done_and_is_compact(chat_of):
    async with chat_of() as (scene, _):
        async with scene.client.stream(
            "POST", "/v1/completions", json={**SEEDED, "prompt": "letters", "stream": True, "return_token_ids": True}
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join([part async for part in response.aiter_text()])
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith('data: {"id":"cmpl-') for event in events)
        assert '"usage"' not in text
        assert '"prompt_token_ids":[21,' in events[0]


async def test_samples_and_prompts_have_choices_in_a_row(chat):
    scene, openai = chat
    other = [3, 2, 1]
    made = await openai.completions.create(prompt=[PROMPT, other], **SEEDED, n=2, extra_body={"return_token_ids": True})
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    right = [want(scene, prompt, index) for prompt in (PROMPT, other) for index in (0, 1)]
    assert [choice.token_ids for choice in made.choices] == right
    assert [choice.prompt_token_ids for choice in made.choices] == [PROMPT, PROMPT, other, other]
    assert made.usage.prompt_tokens == 10
    assert made.usage.completion_tokens == 48
    made = await openai.completions.create(prompt=["abc", "de"], **SEEDED)
    texts = [text_of_prompt(scene, prompt) for prompt in ("abc", "de")]
    assert [choice.text for choice in made.choices] == texts
    stream = await openai.completions.create(prompt=["abc"], **SEEDED, n=2, stream=True)
    grown = ["", ""]
    ends = []
    async for chunk in stream:
        (choice,) = chunk.choices
        grown[choice.index] += choice.text
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert grown[0] == texts[0] != grown[1]
    assert ends == ["length", "length"]


def text_of_prompt(scene, text):
    own = ChatText(scene)
    return own.decode(want(scene, own.encode(text)))


class ChatText:
    """The tokenizer of the scene, on either kind of generator."""

    def __init__(self, scene):
        from string import ascii_lowercase, printable

        self.encode = lambda text: [printable.index(letter) for letter in text]
        self.decode = lambda ids: "".join(
            [printable[token] if token < 100 else ascii_lowercase[token % 26] for token in ids]
        )


async def test_log_probs_tell_tokens_values_and_places(chat_of):
    async with chat_of(dialect="vllm") as (scene, openai):
        made = await openai.completions.create(prompt=PROMPT, **{**SEEDED, "model": ""}, logprobs=3)
        told = made.choices[0].logprobs
        right = want(scene)
        assert told.tokens == [text_of(scene, [token]) for token in right]
        assert told.text_offset == list(range(12))
        result = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=12, seed=7, logprobs="raw"))
        np.testing.assert_allclose(told.token_logprobs, result.raw_logprobs, rtol=1e-6)
        assert all(top[token] == value for top, token, value in zip(
            told.top_logprobs, told.tokens, told.token_logprobs, strict=True))  # fmt: skip
        assert max(map(len, told.top_logprobs)) > 1
        # TRL and AReaL read ids
        body = {"prompt": PROMPT, "model": "", "logprobs": 0, "return_tokens_as_token_ids": True}
        told = (await raw(scene, **body))["choices"][0]["logprobs"]
        assert told["tokens"] == [f"token_id:{token}" for token in right]
        assert all(len(top) == 1 for top in told["top_logprobs"])


@pytest.mark.ci
async def test_log_probs_are_of_the_dialect(chat_of):
    for dialect, kind in (("sglang", "processed_logprobs"), ("vllm", "raw_logprobs")):
        async with chat_of(dialect=dialect) as (scene, _):
            body = {"prompt": PROMPT, "model": "", "logprobs": 0, "temperature": 0.5}
            told = (await raw(scene, **body))["choices"][0]["logprobs"]
            params = SamplingParams(max_tokens=12, seed=7, temperature=0.5, logprobs="both")
            result = await scene.generator.complete(PROMPT, params)
            np.testing.assert_allclose(told["token_logprobs"], getattr(result, kind), rtol=1e-6)
            assert result.raw_logprobs.tolist() != result.processed_logprobs.tolist()


@pytest.mark.ci(after=1)
async def test_stop_bias_and_seeds(chat):
    scene, openai = chat
    text = (await raw(scene, prompt="letters"))["choices"][0]["text"]
    for stop in (text[4:6], ["~", text[4:6]]):
        made = await openai.completions.create(prompt="letters", **SEEDED, stop=stop)
        assert (made.choices[0].text, made.choices[0].finish_reason) == (text[:4], "stop")
        stream = await openai.completions.create(prompt="letters", **SEEDED, stop=stop, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text[:4]
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        kept = await raw(scene, prompt="letters", stop=[text[4:6]], **{name: True})
        assert kept["choices"][0]["text"] == text[:6]
    forced = await openai.completions.create(prompt="letters", **SEEDED, logit_bias={"36": 100})
    assert forced.choices[0].text == "A" * 12
    for seed in (-1, 1 << 70):
        await openai.completions.create(prompt="letters", model="any", max_tokens=1, seed=seed)
    least = await raw(scene, prompt="letters", temperature=0, max_completion_tokens=3)
    assert least["usage"]["completion_tokens"] == 3


async def test_a_stream_gives_no_text_that_a_stop_takes_away(chat_of, special_tags):
    async with chat_of(tokenizer=special_tags()) as (scene, openai):
        text = (await raw(scene, prompt="letters"))["choices"][0]["text"]
        body = {**SEEDED, "prompt": "letters", "stop": text[4:8], "extra_body": {"skip_special_tokens": False}}
        assert (await openai.completions.create(**body)).choices[0].text == text[:4]
        chunks = [chunk.choices[0] async for chunk in await openai.completions.create(**body, stream=True)]
        assert "".join(choice.text for choice in chunks) == text[:4]
        # text comes before it is known whether a stop takes it away, but for what may be one
        assert chunks[-1].finish_reason == "stop"


async def test_rows_come_in_the_form_of_the_field_that_asks(scene_of):
    async with scene_of() as scene:
        result = await scene.generator.complete(PROMPT, SamplingParams(max_tokens=12, seed=7))
        right = result.routing.array
        for start in (0, 3):
            choice = (await raw(scene, prompt=PROMPT, routed_experts_prompt_start=start))["choices"][0]
            rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
            np.testing.assert_array_equal(rows, right[start:])
        choice = (await raw(scene, prompt=PROMPT, return_routed_experts=True))["choices"][0]
        rows = np.frombuffer(base64.b64decode(choice["routed_experts"]), "<i4").reshape(right.shape)
        np.testing.assert_array_equal(rows, right)
        assert choice["routed_experts_start_len"] == 0
        assert "routed_experts" not in (await raw(scene, prompt=PROMPT))["choices"][0]
        # SGLang's clients read priority and salt under other names
        told = await raw(scene, prompt=PROMPT, rid="mine", extra_key="x", priority=3)
        assert told["id"] == "mine"


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("prompt", [[], [[]], "", [1, "a"], ["a", [1], 2], [[1], []]])
async def test_prompts_that_are_none_are_refused(chat_of, prompt):
    async with chat_of() as (scene, _):
        response = await scene.client.post("/v1/completions", json={"prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
